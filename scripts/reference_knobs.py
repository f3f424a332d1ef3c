"""Turn every knob, one at a time, on two links: what it moves, and whether that is what its documentation says.

Run it on a quiet machine with two cores and the right to make network namespaces; it takes about a quarter of an hour::

    python scripts/reference_knobs.py [--rounds 4] [--links 2gbit] [--reuse]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reference import LINKS, Benchmark, Document, head, label, measure, mebibytes, parser, publish, row

from zerotune.config.knobs import REGISTRY
from zerotune.records import Interval
from zerotune.train.measure import paired_ratio

NAME = "knobs-10m"
DEFAULTS = "zerotune"

COUNTED = 0.002
"""Relative change of what is counted (bytes, collectives, elements, memory) below which it is the same."""

TIMED = 0.1
"""Relative change of the milliseconds of one step's ledger below which they are the same."""


@dataclass(frozen=True)
class Turn:
    """One knob, turned.

    Attributes:
        knob: Which one.
        to: What it is set to.
        promise: What its documentation says that this does, as figures that move: ``sent -`` for less of it, ``+`` for
            more, ``=`` for the same.
        beside: What is set beside it, and in what it is compared with, because the knob acts only there.
    """

    knob: str
    to: str
    promise: tuple[str, ...]
    beside: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.knob}-{self.to}"

    @property
    def sets(self) -> str:
        return ",".join((*self.beside, f"{REGISTRY[self.knob].path}={self.to}"))

    @property
    def base(self) -> str:
        """Name of what it is compared with."""
        return "-".join(text.rpartition(".")[2].replace("=", "-") for text in self.beside)


BLOCK = 790_000  # elements of a block, about
TURNS = (
    Turn("stage", "2", ("sent -", "collectives -", "peak +")),
    Turn("stage", "0", ("peak +",)),
    Turn("unit_size", "200k", ("collectives +", "sent +"), ("zero.allgather_bucket_size=200k",)),
    Turn("allgather_bucket_size", str(4 * BLOCK), ("collectives -", "sent =")),
    Turn("prefetch_distance", "0", ("sent +", "hidden gathers -", "exposed gathers +", "time +")),
    Turn("prefetch_distance", str(8 * BLOCK), ("hidden gathers +", "live +")),
    Turn("backward_prefetch_distance", str(8 * BLOCK), ("hidden gathers +", "live +")),
    Turn("param_persistence_threshold", "300k", ("sent -", "collectives -", "peak +")),
    Turn("release", "keep", ("sent -", "collectives -", "exposed gathers -", "live +", "peak +", "time -")),
    Turn(
        "max_reuse_distance", str(12 * BLOCK), ("sent -", "collectives -", "live +"),
        ("zero.release=reuse", "zero.max_reuse_distance=0"),
    ),
    Turn(
        "memory_budget", "210MiB", ("sent -", "live +", "peak +"),
        ("zero.release=planned", "zero.memory_budget=187MiB"),
    ),
    Turn("max_live_parameters", "800k", ("live -", "peak -")),
    Turn("reduce_bucket_size", "200k", ("reductions +", "sent =")),
    Turn("overlap_comm", "false", ("sent =", "hidden -", "exposed +", "time +")),
    Turn("micro_batch_size", "2", ("peak -", "sent +", "collectives +", "time +")),
    Turn("activation_checkpointing", "full", ("peak -", "sent =", "time +")),
    Turn(
        "accumulate", "local", ("sent -", "reductions -", "peak +", "time -"), ("train.micro_batch_size=2",)
    ),
)  # fmt: skip


def benchmark() -> Benchmark:
    """All turns in one run, and what they are compared with."""
    unturned = set(REGISTRY) - {turn.knob for turn in TURNS}
    if unturned:
        raise SystemExit(f"no turn of {', '.join(sorted(unturned))}: say what it promises in TURNS")
    variants = {turn.base: ",".join(turn.beside) for turn in TURNS if turn.beside}
    variants |= {turn.name: turn.sets for turn in TURNS}
    return Benchmark((DEFAULTS, *(f"zerotune:{name}" for name in variants)), variants, steps=1)


# ---------------------------------------------------------------------------------------------- figures and promises


def _flows(figures: Document, purposes: tuple[str, ...], what: str) -> float:
    return sum(flow[what] for purpose, flow in figures["flows"].items() if purpose in purposes)


_GATHERS = ("forward", "backward")

FIGURES: dict[str, tuple[Callable[[Document], float], float]] = {
    "sent": (lambda figures: figures["sent_bytes"], COUNTED),
    "collectives": (lambda figures: figures["collectives"], COUNTED),
    "reductions": (lambda figures: _flows(figures, ("gradient",), "count"), COUNTED),
    "peak": (lambda figures: figures["peak_memory_bytes"], COUNTED),
    "live": (lambda figures: figures["peak_live_elements"], COUNTED),
    "hidden": (lambda figures: figures["hidden_s"], TIMED),
    "exposed": (lambda figures: figures["exposed_s"], TIMED),
    "hidden gathers": (lambda figures: _flows(figures, _GATHERS, "hidden_s"), TIMED),
    "exposed gathers": (lambda figures: _flows(figures, _GATHERS, "exposed_s"), TIMED),
}
"""What can move, and the relative change below which it has not."""


@dataclass(frozen=True)
class Turned:
    """What a turn did on one link.

    Attributes:
        turn: Which.
        figures: Of the engine.
        base: Of what it is compared with.
    """

    turn: Turn
    figures: Document
    base: Document

    @property
    def time(self) -> Interval:
        """Step time over that of what it is compared with, paired within rounds."""
        return paired_ratio(self.figures["round_times_s"], self.base["round_times_s"])

    def moved(self, figure: str) -> str:
        """``+``, ``-`` or ``=``."""
        if figure == "time":
            return "+" if self.time.low > 1 else "-" if self.time.high < 1 else "="
        read, least = FIGURES[figure]
        now, before = read(self.figures), read(self.base)
        if abs(now - before) <= least * max(abs(now), abs(before)):
            return "="
        return "+" if now > before else "-"

    def broken(self) -> list[str]:
        """Promises that were not kept, and what happened instead."""
        texts = []
        for promise in self.turn.promise:
            figure, _, wanted = promise.rpartition(" ")
            found = self.moved(figure)
            if found != wanted:
                texts.append(f"{figure} {found}")
        return texts


def turned(document: Document) -> list[Turned]:
    """Every turn with its base."""
    engines = document["engines"]
    return [
        Turned(
            turn,
            engines[f"zerotune:{turn.name}"],
            engines[f"zerotune:{turn.base}" if turn.beside else DEFAULTS],
        )
        for turn in TURNS
    ]


# ------------------------------------------------------------------------------------------------ table and picture


def table(documents: dict[str, Document]) -> str:
    """For every link one row per turn."""
    first = next(iter(documents.values()))
    lines = [
        "# Every knob turned",
        "",
        label(first),
        "*time*: the paired ratio to what is in the second column, with its 95 % interval. *hidden* and *exposed*: "
        "milliseconds of one step's collectives under way beside compute, and waited for. *as documented*: `+`, `-` and "
        "`=` are what the knob's page promises of a figure; what moved otherwise is named. A time has moved if the "
        f"interval lies on one side of 1, milliseconds if they changed by more than {TIMED:.0%}.",
    ]
    for link, document in documents.items():
        lines += [
            "",
            f"## {LINKS[link]}",
            "",
            *head(
                ["setting", "against", "time", "hidden", "exposed", "peak", "sent", "collectives", "live", "as documented"]
            ),
            row(["defaults", "", f"{document['engines'][DEFAULTS]['step_time_s'] * 1e3:.0f} ms",
                 *_figures(document["engines"][DEFAULTS]), ""]),
            *(_row(each) for each in turned(document)),
        ]  # fmt: skip
    lines += ["", "What each knob's page says:", ""]
    lines += [
        f"- `{info.name}`: {'; '.join(filter(None, (info.meaning, info.note)))}" for info in REGISTRY.values()
    ]
    return "\n".join(lines) + "\n"


def _row(each: Turned) -> str:
    turn, time = each.turn, each.time
    broken = each.broken()
    verdict = "yes" if not broken else f"no: {', '.join(broken)}"
    return row(
        [
            f"`{turn.knob}: {turn.to}`",
            ", ".join(f"`{text.rpartition('.')[2].replace('=', ': ')}`" for text in turn.beside)
            or "defaults",
            f"{time.value:.3f} [{time.low:.3f}, {time.high:.3f}]",
            *_figures(each.figures),
            f"{', '.join(turn.promise)}: {verdict}",
        ]
    )


def _figures(figures: Document) -> list[str]:
    return [
        f"{figures['hidden_s'] * 1e3:.0f}",
        f"{figures['exposed_s'] * 1e3:.0f}",
        mebibytes(figures["peak_memory_bytes"]),
        mebibytes(figures["sent_bytes"]),
        str(figures["collectives"]),
        f"{figures['peak_live_elements'] / 1e6:.2f} M",
    ]


def picture(documents: dict[str, Document], path: Path) -> None:
    """For every link the time ratio of each turn, and its hidden and exposed milliseconds."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1,
        2 * len(documents),
        figsize=(7 * len(documents), 6),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for number, (link, document) in enumerate(documents.items()):
        times, costs = axes[0][2 * number], axes[0][2 * number + 1]
        each = turned(document)
        names = [f"{one.turn.knob}: {one.turn.to}" for one in each]
        values = [one.time for one in each]
        times.errorbar(
            [time.value for time in values],
            names,
            xerr=[[time.value - time.low for time in values], [time.high - time.value for time in values]],
            fmt="o",
            color="#2a6f97",
        )
        times.axvline(1, color="#adb5bd", zorder=0)
        times.set_title(LINKS[link])
        times.set_xlabel("step time over that without it")
        hidden = [one.figures["hidden_s"] * 1e3 for one in each]
        exposed = [one.figures["exposed_s"] * 1e3 for one in each]
        costs.barh(names, exposed, color="#c1666b", label="exposed")
        costs.barh(names, hidden, left=exposed, color="#adb5bd", label="hidden")
        costs.set_xlabel("ms of collectives in a step")
        costs.legend(fontsize="small")
    axes[0][0].invert_yaxis()  # shared
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    given = parser(__doc__, rounds=4, links=["2gbit", "500mbit"]).parse_args()
    folder = given.folder
    documents = measure(
        {"knobs": benchmark()}, folder / f"{NAME}.json", given.links, given.rounds, given.reuse
    )["knobs"]
    picture(documents, folder / f"{NAME}.svg")
    publish(folder, NAME, table(documents), "what each knob moves")


if __name__ == "__main__":
    main()

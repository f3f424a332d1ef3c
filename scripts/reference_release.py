"""`release: planned` under several memory budgets, over the best setting for all units that meets the same budget.

Run it on a quiet machine with two cores and the right to make network namespaces; it takes about ten minutes::

    python scripts/reference_release.py [--rounds 12] [--links 500mbit]
"""

from __future__ import annotations

from statistics import median

from reference import LINKS, Benchmark, Document, head, label, measure, mebibytes, parser, publish, row, shown

from zerotune.records import Interval
from zerotune.train.measure import paired_ratio

NAME = "release-10m"
_MIB = 2**20
_MODEL = 10_541_568
BUDGETS_MIB = (174, 178, 182, 186, 190)
"""From what `after_use` takes to what `keep` takes."""

GLOBAL = {
    "keep": "zero.release=keep",
    "reuse": f"zero.release=reuse,zero.max_reuse_distance={_MODEL // 2}",
    "reuse-far": f"zero.release=reuse,zero.max_reuse_distance={_MODEL}",
}
"""The other settings for all units; the engine `zerotune` is `after_use`."""

BENCHMARK = Benchmark(
    ("zerotune", *(f"zerotune:{name}" for name in GLOBAL), *(f"zerotune:at-{mib}" for mib in BUDGETS_MIB)),
    GLOBAL | {f"at-{mib}": f"zero.release=planned,zero.memory_budget={mib}MiB" for mib in BUDGETS_MIB},
    steps=2,
)


def best_global(document: Document, budget_bytes: float) -> str:
    """The fastest setting for all units whose peak meets a budget."""
    engines = document["engines"]
    fitting = [
        name
        for name in ("zerotune", *(f"zerotune:{name}" for name in GLOBAL))
        if engines[name]["peak_memory_bytes"] <= budget_bytes
    ]
    return min(fitting, key=lambda name: median(engines[name]["round_times_s"]))


def over(document: Document, mine: str, theirs: str) -> Interval:
    """Step time over another's, paired within rounds."""
    engines = document["engines"]
    return paired_ratio(engines[mine]["round_times_s"], engines[theirs]["round_times_s"])


def table(documents: dict[str, Document]) -> str:
    lines = [
        "# `release: planned` under a budget",
        "",
        "GPT of 10.5 M parameters (`examples/bench.yaml`). For each `memory_budget` the step time of `release: planned` over that of "
        "the fastest setting for all units (`after_use`, `keep`, `reuse` at half the model and at all of it) whose peak meets the same "
        "budget; at most 1 within the interval: planned does not lose to it.",
    ]
    for link, document in documents.items():
        engines = document["engines"]
        lines += [
            "",
            f"## {LINKS[link]}",
            "",
            label(document),
            "",
            *head(["setting for all units", "step ms", "peak memory"]),
        ]
        for name in ("zerotune", *(f"zerotune:{name}" for name in GLOBAL)):
            setting = f"`{GLOBAL[name.partition(':')[2]]}`" if ":" in name else "the defaults (`after_use`)"
            lines.append(row([setting, _ms(engines[name]), mebibytes(engines[name]["peak_memory_bytes"])]))
        lines += [
            "",
            *head(["budget", "planned: step ms", "peak memory", "the best for all units", "planned over it"]),
        ]
        for mib in BUDGETS_MIB:
            planned = f"zerotune:at-{mib}"
            best = best_global(document, mib * _MIB)
            lines.append(
                row(
                    [
                        f"{mib} MiB",
                        _ms(engines[planned]),
                        mebibytes(engines[planned]["peak_memory_bytes"]),
                        f"`{best.partition(':')[2] or 'after_use'}`",
                        shown(over(document, planned, best)),
                    ]
                )
            )
    return "\n".join(lines) + "\n"


def _ms(figures: Document) -> str:
    return f"{figures['step_time_s'] * 1e3:.0f}"


def main() -> None:
    given = parser(__doc__, rounds=12, links=["2gbit", "500mbit"]).parse_args()
    path = given.folder / f"{NAME}.json"
    documents = measure({NAME: BENCHMARK}, path, given.links, given.rounds, given.reuse)[NAME]
    publish(given.folder, NAME, table(documents), picture=None)


if __name__ == "__main__":
    main()

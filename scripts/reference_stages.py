"""Stages 0 to 3 on two models and three links: where partitioning parameters pays, and where it does not.

Run it on a quiet machine with two cores and the right to make network namespaces; it takes about half an hour::

    python scripts/reference_stages.py [--rounds 4] [--links 2gbit] [--models 10m] [--reuse]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from reference import (
    LINKS,
    Benchmark,
    Document,
    errors,
    head,
    label,
    measure,
    mebibytes,
    parser,
    publish,
    row,
)

from zerotune.records import Interval
from zerotune.train.measure import paired_ratio

NAME = "stages"
STAGES = {3: "zerotune", 2: "zerotune:stage-2", 1: "zerotune:stage-1", 0: "zerotune:stage-0"}
VARIANTS = {f"stage-{stage}": f"zero.stage={stage}" for stage in (2, 1, 0)}
MODELS = {
    "10m": Benchmark(tuple(STAGES.values()), VARIANTS),
    "34m": Benchmark(tuple(STAGES.values()), VARIANTS, ("model.gpt.d_model=512",), size=3.0),
}


@dataclass(frozen=True)
class Budget:
    """A memory budget that one stage alone meets, if there is one.

    Attributes:
        stage: The stage with the smallest peak.
        size: Bytes, halfway between its peak and the next.
    """

    stage: int
    size: int

    @classmethod
    def of(cls, document: Document) -> Budget:
        """The budget of a model, from the peaks that were measured."""
        (least, stage), (following, _) = sorted((_peak(document, stage), stage) for stage in STAGES)[:2]
        return cls(stage, (least + following) // 2)


def _peak(document: Document, stage: int) -> int:
    peak: int = document["engines"][STAGES[stage]]["peak_memory_bytes"]
    return peak


def against(document: Document, stage: int) -> Interval:
    """Step time of stage 3 over that of another, paired within rounds."""
    three, other = (document["engines"][STAGES[each]]["round_times_s"] for each in (3, stage))
    return paired_ratio(three, other)


def verdict(document: Document) -> str:
    """Whether stage 3 pays on this link, in words."""
    others = {stage: against(document, stage) for stage in STAGES if stage != 3}
    slower = [stage for stage, time in others.items() if time.high < 1]
    faster = [stage for stage, time in others.items() if time.low > 1]
    least = Budget.of(document).stage
    memory = "in the least memory" if least == 3 else f"but stage {least} takes the least memory"
    if not faster:
        beats = (
            f"faster than stage {_listed(slower)}"
            if slower
            else "no slower than any other beyond the interval"
        )
        return f"stage 3 pays: it is {beats}, {memory}"
    best = min(faster, key=lambda stage: document["engines"][STAGES[stage]]["step_time_s"])
    time = others[best]
    costs = f"stage 3 costs {time.value - 1:.0%} [{time.low - 1:.0%}, {time.high - 1:.0%}] over stage {best}"
    if least == 3:
        return f"{costs}: it pays only where {mebibytes(_peak(document, best))} do not fit"
    return f"{costs}, {memory}: it does not pay"


def _listed(stages: list[int]) -> str:
    return " and ".join(map(str, sorted(stages)))


def table(measured: dict[str, dict[str, Document]]) -> str:
    """For every model one row per stage, and what follows from it."""
    lines = [
        "# Stages 0 to 3",
        "",
        "Step time in ms, and the paired ratio of stage 3 to it with its 95 % interval (below 1: stage 3 is faster). "
        "*sent*: bytes that a rank sends in a step. *budget*: halfway between the two smallest peaks; who meets it.",
    ]
    for name, documents in measured.items():
        first = next(iter(documents.values()))
        budget = Budget.of(first)
        lines += [
            "",
            f"## {name}",
            "",
            label(first),
            "",
            *head(
                [
                    *("stage", *(LINKS[link] for link in documents), "peak memory", "sent", "collectives"),
                    f"budget {mebibytes(budget.size)}",
                ]
            ),
        ]
        for stage in sorted(STAGES):
            figures = first["engines"][STAGES[stage]]
            lines.append(
                row(
                    [
                        str(stage),
                        *(_cell(document, stage) for document in documents.values()),
                        mebibytes(figures["peak_memory_bytes"]),
                        mebibytes(figures["sent_bytes"]),
                        str(figures["collectives"]),
                        "meets it" if figures["peak_memory_bytes"] <= budget.size else "",
                    ]
                )
            )
        lines.append("")
        lines += [f"- {LINKS[link]}: {verdict(document)}." for link, document in documents.items()]
    return "\n".join(lines) + "\n"


def _cell(document: Document, stage: int) -> str:
    time, below, above = errors(document["engines"][STAGES[stage]])
    text = f"{time:.0f} [{time - below:.0f}, {time + above:.0f}]"
    if stage == 3:
        return text
    ratio = against(document, stage)
    return f"{text}, {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def picture(measured: dict[str, dict[str, Document]], path: Path) -> None:
    """Peak memory and step time of every stage: one panel per model, one line per link, and the budget."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(measured), figsize=(6.5 * len(measured), 4.5), layout="constrained", squeeze=False
    )
    for axis, (name, documents) in zip(axes[0], measured.items(), strict=True):
        for link, document in documents.items():
            peaks = [_peak(document, stage) / 2**20 for stage in STAGES]
            times, below, above = zip(
                *(errors(document["engines"][engine]) for engine in STAGES.values()), strict=True
            )
            axis.errorbar(peaks, times, yerr=[below, above], marker="o", label=LINKS[link])
            for stage, peak, time in zip(STAGES, peaks, times, strict=True):
                axis.annotate(str(stage), (peak, time), textcoords="offset points", xytext=(4, 5))
        budget = Budget.of(next(iter(documents.values()))).size / 2**20
        axis.axvline(budget, color="#c1666b", linestyle="--", label="budget")
        axis.set_title(f"{name}: the number is the stage")
        axis.set_xlabel("peak memory, MiB")
        axis.set_ylabel("ms per step")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    figure.savefig(path)
    plt.close(figure)


def _models(text: str) -> list[str]:
    models = text.split(",")
    unknown = [model for model in models if model not in MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no model {unknown[0]}; take some of {', '.join(MODELS)}")
    return models


def main() -> None:
    options = parser(__doc__, rounds=4, links=list(LINKS))
    options.add_argument(
        "--models",
        type=_models,
        default=list(MODELS),
        help=f"default: {','.join(MODELS)}; 34m has d_model 512",
    )
    given = options.parse_args()
    folder = given.folder
    measured = measure(
        {name: MODELS[name] for name in given.models},
        folder / f"{NAME}.json",
        given.links,
        given.rounds,
        given.reuse,
    )
    picture(measured, folder / f"{NAME}.svg")
    publish(folder, NAME, table(measured), "step time against peak memory")


if __name__ == "__main__":
    main()

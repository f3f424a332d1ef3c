"""The least memory: a setting of the `memory` space against FSDP2, both with activation checkpointing, on one link.

Run it on a quiet machine with two cores and the right to make network namespaces; it takes two minutes::

    python scripts/reference_memory.py [--rounds 8] [--links 2gbit]
"""

from __future__ import annotations

from reference import LINKS, Benchmark, Document, head, label, measure, mebibytes, parser, publish, row, shown

from zerotune.records import Interval
from zerotune.train.measure import paired_ratio

NAME = "memory-10m"
BLOCK = 789_248
LEAN = {
    "prefetch_distance": 0,
    "param_persistence_threshold": 0,
    "allgather_bucket_size": BLOCK // 2,
    "reduce_bucket_size": BLOCK // 4,
    "max_live_parameters": BLOCK,
}
"""Every value is one of the ``memory`` space."""

SETTING = ",".join(f"zero.{knob}={value}" for knob, value in LEAN.items())
BENCHMARK = Benchmark(
    ("zerotune", "zerotune:lean", "fsdp2", "ddp"),
    {"lean": SETTING},
    ("train.activation_checkpointing=full",),
)


def against(document: Document, engine: str) -> Interval:
    """Step time of the lean setting over that of another engine, paired within rounds."""
    mine, theirs = (document["engines"][name]["round_times_s"] for name in ("zerotune:lean", engine))
    return paired_ratio(mine, theirs)


def table(documents: dict[str, Document]) -> str:
    lines = [
        "# The least memory",
        "",
        "GPT of 10.5 M parameters, `train.activation_checkpointing: full` for every engine, the same micro-batch. *lean*: "
        + ", ".join(f"`{knob}: {value}`" for knob, value in LEAN.items())
        + ", all values of the `memory` space.",
        "",
    ]
    for link, document in documents.items():
        least = document["engines"]["zerotune:lean"]["peak_memory_bytes"]
        lines += [
            f"## {LINKS[link]}",
            "",
            label(document),
            "",
            *head(["engine", "step ms", "lean over it", "peak memory", "lean over it"]),
        ]
        for engine, figures in document["engines"].items():
            if figures["peak_memory_bytes"] is None:
                continue
            peak = figures["peak_memory_bytes"]
            time = "" if engine == "zerotune:lean" else shown(against(document, engine))
            cells = [
                engine,
                f"{figures['step_time_s'] * 1e3:.0f}",
                time,
                mebibytes(peak),
                f"{least / peak:.3f}",
            ]
            lines.append(row(cells))
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    given = parser(__doc__, rounds=8, links=["2gbit"]).parse_args()
    documents = measure(
        {NAME: BENCHMARK}, given.folder / f"{NAME}.json", given.links, given.rounds, given.reuse
    )[NAME]
    publish(given.folder, NAME, table(documents), picture=None)


if __name__ == "__main__":
    main()

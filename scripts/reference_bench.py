"""Make the committed benchmark: every engine on three links, as JSON, one table and one picture.

Run it on a quiet machine with two cores and the right to make network namespaces; it takes about a quarter of an hour::

    python scripts/reference_bench.py [--rounds 8] [--links 2gbit] [--engines zerotune,fsdp2,ddp]
        [--set model.gpt.d_model=512 --name gpt-34m]
"""

from __future__ import annotations

from pathlib import Path

import torch
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
    ratio,
    row,
)

from zerotune.config.load import load_job
from zerotune.models.build import build_model
from zerotune.models.units import largest_block

ENGINES = (
    "zerotune",
    "zerotune:two",
    "zerotune:keep",
    "zerotune:keep-far",
    "fsdp2",
    "fsdp2:keep",
    "fsdp2:async",
    "ddp",
    "deepspeed",
    "deepspeed:scaled",
)
EXAMPLE = Path(__file__).parents[1] / "examples" / "bench.yaml"


def variants(sets: list[str], engines: tuple[str, ...]) -> dict[str, str]:
    """Those that are wanted of: ``two`` blocks ahead instead of four; ``keep``; ``keep-far``: kept, and eight ahead."""
    with torch.device("meta"):
        block = largest_block(build_model(load_job(EXAMPLE, sets).job.model, 0))
    known = {
        "two": f"zero.prefetch_distance={2 * block}",
        "keep": "zero.release=keep",
        "keep-far": f"zero.release=keep,zero.prefetch_distance={8 * block}",
    }
    return {name: knobs for name, knobs in known.items() if f"zerotune:{name}" in engines}


def table(name: str, documents: dict[str, Document]) -> str:
    """One row per engine, one column per link."""
    first = next(iter(documents.values()))
    lines = [
        f"# {name}",
        "",
        label(first),
        "Step time in ms, and the paired ratio of `zerotune` to it with its 95 % interval (below 1: `zerotune` is faster).",
        "",
        *head(["engine", *(LINKS[link] for link in documents), "peak memory"]),
    ]
    for engine, figures in first["engines"].items():
        cells = [_cell(engine, document) for document in documents.values()]
        lines.append(row([engine, *cells, mebibytes(figures["peak_memory_bytes"])]))
    limits = [ratio(document["ratios"]["zerotune/limit"]) for document in documents.values()]
    lines.append(row(["zerotune over its own limit", *limits, ""]))
    return "\n".join(lines) + "\n"


def _cell(engine: str, document: Document) -> str:
    time = f"{document['engines'][engine]['step_time_s'] * 1e3:.0f}"
    to_it = document["ratios"].get(f"zerotune/{engine}")
    return time if to_it is None else f"{time}, {ratio(to_it)}"


def picture(documents: dict[str, Document], path: Path) -> None:
    """Step times of every engine on every link, with their intervals, and the limit of each."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(documents), figsize=(13, 4), layout="constrained", squeeze=False)
    for axis, (link, document) in zip(axes[0], documents.items(), strict=True):
        names = list(document["engines"])
        times, low, high = zip(*(errors(document["engines"][name]) for name in names), strict=True)
        colours = ["#2a6f97" if name.startswith("zerotune") else "#adb5bd" for name in names]
        axis.barh(names, times, xerr=[low, high], color=colours)
        limits = [document["engines"][name]["limit_s"] * 1e3 for name in names]
        axis.plot(limits, names, "k|", markersize=14)
        axis.invert_yaxis()
        axis.set_title(LINKS[link])
        axis.set_xlabel("ms per step; the mark is the engine's own limit")
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__, rounds=8, links=list(LINKS))
    options.add_argument("--name", default="gpt-10m")
    options.add_argument("--engines", default=",".join(ENGINES), help="some of them")
    options.add_argument("--set", action="append", default=[], dest="sets")
    given = options.parse_args()
    folder, name = given.folder, given.name
    engines = tuple(given.engines.split(","))
    benchmark = Benchmark(engines, variants(given.sets, engines), tuple(given.sets))
    documents = measure({name: benchmark}, folder / f"{name}.json", given.links, given.rounds, given.reuse)[
        name
    ]
    picture(documents, folder / f"{name}.svg")
    publish(folder, name, table(name, documents), "step times")


if __name__ == "__main__":
    main()

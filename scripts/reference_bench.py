"""Make the committed benchmark: every engine on three links, as JSON, one table and one picture.

Rounds are many and short, which brings those that are compared close together in time. Run it on a quiet machine with two
cores and the right to make network namespaces; it takes about half an hour::

    python scripts/reference_bench.py [--rounds 16] [--links 2gbit] [--engines zerotune,fsdp2,ddp]
        [--set model.gpt.d_model=512 --name gpt-34m]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from statistics import mean, median

import reference_search
from reference import (
    LINKS,
    Benchmark,
    Document,
    errors,
    head,
    label,
    measure,
    mebibytes,
    meta_model,
    parser,
    publish,
    ratio,
    row,
    shown,
)

from zerotune.models.units import largest_block
from zerotune.train.measure import paired_ratio

ENGINES = (
    "zerotune",
    "zerotune:keep",
    "zerotune:best",
    "fsdp2",
    "fsdp2:keep",
    "fsdp2:async",
    "ddp",
    "deepspeed",
    "deepspeed:scaled",
)


def variants(sets: list[str], engines: tuple[str, ...]) -> dict[str, str]:
    """Those that are wanted of: ``two`` blocks ahead instead of four; ``keep``; ``keep-far``: kept, and eight ahead. ``best``
    is what ``reference_search.py`` found on a link."""
    block = largest_block(meta_model(sets))
    known = {
        "two": f"zero.prefetch_distance={2 * block}",
        "keep": "zero.release=keep",
        "keep-far": f"zero.release=keep,zero.prefetch_distance={8 * block}",
    }
    return {name: knobs for name, knobs in known.items() if f"zerotune:{name}" in engines}


def table(name: str, documents: dict[str, Document], searched: Collection[str]) -> str:
    """One row per engine, one column per link; and what is compared, by link.

    Args:
        name: The benchmark's.
        documents: By link.
        searched: Links on which a search ran.
    """
    lines = [
        f"# {name}",
        "",
        label(next(iter(documents.values()))),
        "Step time in ms, and the paired ratio of `zerotune` to it with its 95 % interval (below 1: `zerotune` is faster).",
        "",
        *head(["engine", *(LINKS[link] for link in documents), "peak memory"]),
    ]
    engines = {
        engine: figures for document in documents.values() for engine, figures in document["engines"].items()
    }
    for engine, figures in engines.items():
        cells = [_cell(engine, document) for document in documents.values()]
        lines.append(row([engine, *cells, mebibytes(figures["peak_memory_bytes"])]))
    rounds = [f"{document['rounds']} x {document['steps_per_round']}" for document in documents.values()]
    lines.append(row(["rounds x steps", *rounds, ""]))
    lines += _processor(documents, engines)
    compared = [comparisons(document, link in searched) for link, document in documents.items()]
    lines += [
        "",
        "Paired ratios of step time, with their 95 % intervals; *best* is what `zerotune search` found on that link.",
        "",
        *head(["", *(LINKS[link] for link in documents)]),
        *(row([what, *(each.get(what, "") for each in compared)]) for what in compared[0]),
        "",
        "For every setting of a peer, the fastest of ours that takes no more memory, over it.",
        "",
        *head(["peer", *(LINKS[link] for link in documents)]),
    ]
    peers = [
        engine
        for engine, figures in engines.items()
        if not engine.startswith("zerotune") and figures["peak_memory_bytes"]
    ]
    lines += [row([peer, *(_no_larger(document, peer) for document in documents.values())]) for peer in peers]
    return "\n".join(lines) + "\n"


def _processor(documents: dict[str, Document], engines: Iterable[str]) -> list[str]:
    """What a step consists of, where a rank has one core."""
    spent = {
        engine: [_spent(document["engines"].get(engine)) for document in documents.values()]
        for engine in engines
    }
    if not any(any(cells) for cells in spent.values()):
        return []
    return [
        "",
        "A step of an engine, ms, mean over rounds and ranks: its own code (torch, Python) + the kernel (sockets, page "
        "faults) + standing still (for the link, for the other rank).",
        "",
        *head(["engine", *(LINKS[link] for link in documents)]),
        *(row([engine, *cells]) for engine, cells in spent.items()),
    ]


def _spent(figures: Document | None) -> str:
    if figures is None or not figures.get("program_s"):
        return ""
    program, kernel = figures["program_s"], figures["kernel_s"]
    still = max(0.0, mean(figures["round_times_s"]) - program - kernel)
    return f"{program * 1e3:.0f} + {kernel * 1e3:.0f} + {still * 1e3:.0f}"


def comparisons(document: Document, is_searched: bool) -> dict[str, str]:
    """Paired ratios that are asked for, of engines that were measured.

    Args:
        document: Of one link.
        is_searched: Whether a search ran on it; where it found nothing faster than the defaults, these are the best.
    """
    times = {engine: figures["round_times_s"] for engine, figures in document["engines"].items()}

    def fastest(kind: str) -> str:
        return min(
            (each for each in times if each.partition(":")[0] == kind),
            key=lambda each: median(times[each]),
            default="",
        )

    best = "zerotune:best" if "zerotune:best" in times else "zerotune" if is_searched else ""
    asked = {
        "defaults / FSDP2": ("zerotune", "fsdp2"),
        "best / FSDP2": (best, "fsdp2"),
        "best / FSDP2, its best setting": (best, fastest("fsdp2")),
        "best / DDP": (best, "ddp"),
        "best / DeepSpeed, its better setting": (best, fastest("deepspeed")),
    }
    compared = {
        what: shown(paired_ratio(times[mine], times[theirs])) if mine in times and theirs in times else ""
        for what, (mine, theirs) in asked.items()
    }
    return compared | {"defaults / own limit": ratio(document["ratios"]["zerotune/limit"])}


def _no_larger(document: Document, peer: str) -> str:
    """The fastest of our engines whose peak is not above a peer's, over it."""
    engines = document["engines"]
    if peer not in engines:
        return ""
    ours = [
        name
        for name, figures in engines.items()
        if name.startswith("zerotune") and figures["peak_memory_bytes"] <= engines[peer]["peak_memory_bytes"]
    ]
    if not ours:
        return "none"
    best = min(ours, key=lambda name: median(engines[name]["round_times_s"]))
    over = paired_ratio(engines[best]["round_times_s"], engines[peer]["round_times_s"])
    return f"`{best}`: {shown(over)}"


def _cell(engine: str, document: Document) -> str:
    if engine not in document["engines"]:
        return ""
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
    options = parser(__doc__, rounds=16, links=list(LINKS))
    options.add_argument("--name", default="gpt-10m")
    options.add_argument("--engines", default=",".join(ENGINES), help="some of them")
    options.add_argument("--set", action="append", default=[], dest="sets")
    options.add_argument("--steps", type=int, default=2, help="of one measurement")
    given = options.parse_args()
    folder, name = given.folder, given.name
    engines = tuple(given.engines.split(","))
    searched = folder / f"{name.replace('gpt', 'search')}.json"
    found = reference_search.read(searched) if "zerotune:best" in engines else {}
    best = {
        link: {"best": setting}
        for link, result in found.items()
        if (setting := reference_search.best_setting(result))
    }
    benchmark = Benchmark(
        engines, variants(given.sets, engines), tuple(given.sets), by_link=best, steps=given.steps
    )
    documents = measure({name: benchmark}, folder / f"{name}.json", given.links, given.rounds, given.reuse)[
        name
    ]
    picture(documents, folder / f"{name}.svg")
    publish(folder, name, table(name, documents, found), "step times")


if __name__ == "__main__":
    main()

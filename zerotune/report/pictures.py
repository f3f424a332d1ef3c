"""What the pictures of the documentation show, as data: taken from recorded ledgers and from the slicing itself.

Drawing is :mod:`scripts.figures`'s; keeping the data here lets a test hold what is drawn against what was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerotune.records import ByteClass, CollectiveKind, Ledger
from zerotune.schedule import slice_bounds, slice_numel

LANES = ("compute", "all_gather", "reduce_scatter")
"""Rows of the timeline, from the top."""


@dataclass(frozen=True)
class Cell:
    """One element of a flattened, padded parameter.

    Attributes:
        position: Its place in the flat parameter.
        rank: The rank whose slice it lies in.
        is_padding: Whether it stands beyond the parameter's end.
    """

    position: int
    rank: int
    is_padding: bool


@dataclass(frozen=True)
class Bar:
    """Something that took time.

    Attributes:
        lane: One of :data:`LANES`.
        label: Name of the module or of the units.
        detail: Phase or purpose.
        begin_s: Seconds since the step began.
        end_s: The same.
    """

    lane: str
    label: str
    detail: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step of one rank.

    Attributes:
        bars: Compute and collectives, in order of their beginning.
        releases: When which unit's full parameters were freed.
        live: Bytes of full parameters over time, as steps ``(time, bytes from then on)``.
    """

    bars: tuple[Bar, ...]
    releases: tuple[tuple[float, str], ...]
    live: tuple[tuple[float, int], ...]


def partition_cells(numel: int, ranks: int) -> list[Cell]:
    """Every element of a parameter with its padding, and whose it is."""
    size = slice_numel(numel, ranks)
    cells = []
    for rank in range(ranks):
        start, end = slice_bounds(numel, ranks, rank)
        real = end - start
        cells += [Cell(rank * size + i, rank, is_padding=i >= real) for i in range(size)]
    return cells


def timeline(ledger: Ledger) -> Timeline:
    """A step's bars from its ledger. The root's own use encloses all others and is left out."""
    bars = [
        Bar("compute", use.scope, use.phase, use.begin_s, use.end_s)
        for use in ledger.uses
        if use.scope != "(root)"
    ]
    lanes = {CollectiveKind.ALL_GATHER: "all_gather", CollectiveKind.REDUCE_SCATTER: "reduce_scatter"}
    bars += [
        Bar(lanes[entry.kind], ", ".join(entry.units), entry.purpose, entry.issued_s, entry.done_s)
        for entry in ledger.collectives
        if entry.kind in lanes
    ]
    return Timeline(
        bars=tuple(sorted(bars, key=lambda bar: (bar.begin_s, bar.lane))),
        releases=tuple((entry.time_s, entry.unit) for entry in ledger.releases),
        live=tuple((s.time_s, s.bytes) for s in ledger.samples if s.byte_class is ByteClass.FULL),
    )


def broadcast_owners(layers: int, ranks: int) -> list[int]:
    """The picture that people remember: which rank would own each layer, if whole layers were dealt out."""
    return [layer * ranks // layers for layer in range(layers)]

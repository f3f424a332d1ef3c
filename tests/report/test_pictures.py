"""What the documentation's pictures show is what was recorded."""

from __future__ import annotations

from pathlib import Path

from zerotune.records import CollectiveKind, Ledger
from zerotune.report.pictures import broadcast_owners, partition_cells, timeline
from zerotune.schedule import padded_numel, slice_bounds

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
LEDGER = Ledger.model_validate_json((FIGURES / "step.json").read_text())


def test_every_collective_of_the_step_is_drawn_once_with_its_times() -> None:
    step = timeline(LEDGER)
    drawn = sorted((b.begin_s, b.end_s, b.label) for b in step.bars if b.lane != "compute")
    kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    recorded = sorted(
        (e.issued_s, e.done_s, ", ".join(e.units)) for e in LEDGER.collectives if e.kind in kinds
    )
    assert drawn == recorded
    assert all(bar.begin_s <= bar.end_s for bar in step.bars)


def test_no_broadcast_happens_in_a_steady_step() -> None:
    assert {entry.kind for entry in LEDGER.collectives} == {
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
    }


def test_the_step_gathers_uses_releases_and_reduces_every_block() -> None:
    step = timeline(LEDGER)
    for block in (f"blocks.{i}" for i in range(4)):
        phases = [bar.detail for bar in step.bars if bar.lane == "compute" and bar.label == block]
        assert phases == ["forward", "backward"]
        assert any(bar.lane == "all_gather" and block in bar.label.split(", ") for bar in step.bars)
        assert any(bar.lane == "reduce_scatter" and block in bar.label for bar in step.bars)
        assert block in {unit for _, unit in step.releases}
    for bar in step.bars:
        if bar.lane == "compute" and bar.label.startswith("blocks.") and bar.detail == "forward":
            landed = [
                g.end_s for g in step.bars if g.lane == "all_gather" and bar.label in g.label.split(", ")
            ]
            assert min(landed) <= bar.begin_s, "a block ran before it was gathered"


def test_live_bytes_end_at_nothing() -> None:
    step = timeline(LEDGER)
    assert step.live[-1][1] == 0
    assert max(bytes_ for _, bytes_ in step.live) <= sum(e.elements * 4 for e in LEDGER.collectives)


def test_the_partition_is_the_schedulers() -> None:
    for numel, ranks in ((180, 4), (1, 3), (96, 2)):
        cells = partition_cells(numel, ranks)
        assert [cell.position for cell in cells] == list(range(padded_numel(numel, ranks)))
        for rank in range(ranks):
            real = [c.position for c in cells if c.rank == rank and not c.is_padding]
            assert real == list(range(*slice_bounds(numel, ranks, rank)))


def test_the_broadcast_picture_deals_out_whole_layers() -> None:
    assert broadcast_owners(16, 4) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4

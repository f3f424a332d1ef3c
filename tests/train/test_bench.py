"""Engines in turns, on ranks of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import make_ledger
from tests.ranks import end_pool, run_on_ranks
from tests.train.contexts import FakeContext, make_job
from zerotune.config.load import load_job
from zerotune.records import CollectiveEntry, CollectiveKind
from zerotune.records.bench import BenchReport
from zerotune.records.flow import flows_of
from zerotune.train.bench import BenchSpec, run_bench

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINES = ("zerotune", "ddp", "fsdp2")


@pytest.fixture(scope="module", autouse=True)
def _processes_of_their_own() -> Iterator[None]:
    """Peers change torch where they find it."""
    yield
    end_pool(2)


def measure(rank: int, size: int, recomputed: str) -> BenchReport:
    model = {"gpt": {"layers": 2, "d_model": 32, "heads": 2, "vocab_size": 64, "sequence_length": 64}}
    job = make_job(model, activation_checkpointing=recomputed)
    spec = BenchSpec(job=job, engines=ENGINES, run_dir="", rounds=2, steps_per_round=1, warmup_steps=2)
    return run_bench(FakeContext(rank=rank, world_size=size), spec)


def test_recomputation_is_everybodys() -> None:
    """What the job recomputes, peers recompute, so that memory is compared like with like."""
    kept, recomputed = (run_on_ranks(2, measure, mode, limit=120)[0] for mode in ("none", "full"))
    for name in ENGINES:
        before, after = (report.engine(name).peak_memory_bytes for report in (kept, recomputed))
        assert before is not None and after is not None and after < 0.9 * before, name
        assert recomputed.engine(name).final_loss == pytest.approx(kept.engine(name).final_loss, abs=1e-6)


@pytest.mark.parametrize("width", [256, 512])
def test_defaults_take_no_more_memory_than_fsdp2(width: int) -> None:
    """The reference models, of 10.5 M and 34 M parameters: the larger one's activations are a smaller part of its peak."""
    (report, _) = run_on_ranks(2, peaks, width, limit=300)
    ours, theirs = (report.engine(name).peak_memory_bytes for name in ("zerotune", "fsdp2"))
    assert ours is not None and theirs is not None and ours <= theirs


def peaks(rank: int, size: int, width: int) -> BenchReport:
    job = load_job(EXAMPLES / "bench.yaml", [f"model.gpt.d_model={width}"]).job
    spec = BenchSpec(
        job=job, engines=("zerotune", "fsdp2"), run_dir="", rounds=2, steps_per_round=1, warmup_steps=2
    )
    return run_bench(FakeContext(rank=rank, world_size=size), spec)


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1)), min_size=1, max_size=4))
def test_a_flow_has_the_longest_wait_and_the_most_bytes(ranks: list[tuple[int, float]]) -> None:
    """Whichever rank each of them is of: ranks leave out different zeros of what all would send."""
    ledgers = [
        make_ledger(rank).model_copy(update={"collectives": [gather(1000, left_out, exposed)]})
        for rank, (left_out, exposed) in enumerate(ranks)
    ]
    (flow,) = flows_of(ledgers)
    assert flow.sent_bytes == 1000 - min(left_out for left_out, _ in ranks)
    assert flow.sent_bytes + flow.left_out_bytes == 1000
    assert flow.exposed_s == pytest.approx(max(exposed for _, exposed in ranks))


def gather(nbytes: int, left_out: int, exposed_s: float) -> CollectiveEntry:
    return CollectiveEntry(
        sequence=1,
        kind=CollectiveKind.ALL_GATHER,
        purpose="forward",
        units=("block",),
        elements=nbytes // 2,
        sent_bytes=nbytes - left_out,
        left_out_bytes=left_out,
        issued_s=0.0,
        waited_s=1.0,
        done_s=1.0 + exposed_s,
    )


def test_every_rank_has_the_same_flows() -> None:
    """Peers keep no ledger."""
    first, second = run_on_ranks(2, measure, "none", limit=120)
    assert first == second
    ours = first.engine("zerotune")
    assert {flow.purpose for flow in ours.flows} >= {"forward", "backward", "gradient"}
    assert ours.collectives == sum(flow.count for flow in ours.flows)
    assert ours.sent_bytes == sum(flow.sent_bytes for flow in ours.flows)
    assert first.engine("ddp").flows == [] and first.engine("ddp").collectives == 0

"""Engines in turns, on ranks of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import end_pool, run_on_ranks
from tests.train.contexts import FakeContext, make_job
from zerotune.records.bench import BenchReport
from zerotune.train.bench import BenchSpec, run_bench

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


def test_every_rank_has_the_same_flows() -> None:
    """Collectives cost what they did on the rank where they were exposed most; peers keep no ledger."""
    first, second = run_on_ranks(2, measure, "none", limit=120)
    assert first == second
    ours = first.engine("zerotune")
    assert {flow.purpose for flow in ours.flows} >= {"forward", "backward", "gradient"}
    assert ours.collectives == sum(flow.count for flow in ours.flows)
    assert ours.sent_bytes == sum(flow.sent_bytes for flow in ours.flows)
    assert first.engine("ddp").flows == [] and first.engine("ddp").collectives == 0

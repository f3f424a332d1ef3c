"""Knobs of ``train:`` and all stages through a run: the same training, and what they are for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.train.contexts import make_job, make_spec
from tests.train.test_run import oracle
from tests.train.test_run_zero import run_rank
from zerotune.config.schema import JobConfig
from zerotune.train.spec import RankReport

DEEP = {"gpt": {"layers": 8, "d_model": 32, "heads": 2, "vocab_size": 64, "sequence_length": 64}}
DATA = {"synthetic": {"pad_fraction": 0.3}}
SETTINGS = [
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "every_2", "accumulate": "local"},
    {"activation_checkpointing": "full", "unit_size": 500, "prefetch_distance": 0},
    {"accumulate": "local", "release": "keep"},
]


def job_with(
    model: dict[str, Any] | None = None, knobs: dict[str, Any] | None = None, **train: Any
) -> JobConfig:
    job = make_job(model or make_job().model.model_dump(exclude_none=True), DATA, **train)
    return job.with_knobs(knobs or {})


TRAIN = {
    "global_batch_size": 8, "micro_batch_size": 2, "steps": 5, "clip_norm": 0.1, "optimizer": {"name": "sgd", "lr": 0.5}
}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "number"), [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (3, 3)]
)
def test_they_train_the_plain_loop(stage: int, number: int) -> None:
    losses, _ = oracle(job_with(**TRAIN))
    job = job_with(knobs=SETTINGS[number] | {"stage": stage}, **TRAIN)
    first, second = run_on_ranks(2, run_rank, make_spec(job, "train"))
    assert first.losses == second.losses == pytest.approx(losses, abs=1e-5)
    assert first.job.knobs["activation_checkpointing"] == job.train.activation_checkpointing


def measured(knobs: dict[str, Any]) -> RankReport:
    job = job_with(DEEP, knobs, global_batch_size=16, micro_batch_size=8)
    return run_on_ranks(2, run_rank, make_spec(job, min_steps=5, max_steps=5))[0]


def gathers(report: RankReport) -> Counter[str]:
    """Gathers of a steady step by unit."""
    assert report.ledger is not None
    entries = [e for e in report.ledger.collectives if e.purpose in ("forward", "backward")]
    return Counter(unit for entry in entries for unit in entry.units)


def test_recomputation_shares_the_gathers_and_needs_less_memory() -> None:
    peaks, gathered = {}, {}
    for mode in ("none", "every_2", "full"):
        report = measured({"activation_checkpointing": mode, "param_persistence_threshold": 0})
        assert report.measurement is not None
        memory = report.measurement.memory[0]
        peaks[mode], gathered[mode] = memory.peak - memory.at_rest, gathers(report)
    assert gathered["none"] == gathered["every_2"] == gathered["full"]
    assert gathered["full"]["blocks.3"] == 2, "once in forward, once in backward"
    assert peaks["full"] < peaks["every_2"] < peaks["none"]
    assert peaks["full"] < 0.5 * peaks["none"]


def test_local_accumulation_reduces_once_a_step() -> None:
    counts = {}
    for mode in ("reduce", "local"):
        job = job_with(knobs={"accumulate": mode}, global_batch_size=16, micro_batch_size=2)
        report = run_on_ranks(2, run_rank, make_spec(job, min_steps=5, max_steps=5))[0]
        assert report.ledger is not None
        counts[mode] = sum(e.elements for e in report.ledger.collectives if e.kind.value == "reduce_scatter")
    assert counts["reduce"] == 4 * counts["local"]

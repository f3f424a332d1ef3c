"""A run as the store keeps it."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import Field

from zerotune.config.schema import JobConfig
from zerotune.records.base import Record
from zerotune.records.bench import BenchReport
from zerotune.records.failure import Failure
from zerotune.records.fingerprint import Fingerprint
from zerotune.records.measurement import Confirmed, Interval, Measurement
from zerotune.records.status import Status


class RunKind(StrEnum):
    """What a run was executed for."""

    TRIAL = "trial"
    CONFIRMATION = "confirmation"
    LAUNCH = "launch"
    BENCH = "bench"


def now() -> datetime:
    return datetime.now(UTC)


class RunRecord(Record):
    """One recorded execution.

    Attributes:
        run_id: Short unique name, e.g. ``t-3f9a1c02``; a unique prefix is enough on the command line.
        kind: What it was executed for.
        status: How it stands or ended.
        config: The fully resolved configuration: every ``auto`` is a number, every default written out.
        workload: What is trained. Runs of different workloads are never ranked together.
        cluster: Where: device model, ranks per node, nodes, declared link.
        study: Name of the study it belongs to, if any.
        trial_number: Its number within the study; 0 is the baseline.
        is_baseline: Whether it ran with the defaults that a speed-up is measured against.
        feasible: Whether it met the memory budget; ``None`` where there was no budget or no measurement.
        memory_budget: The budget it was held against, bytes.
        measurement: Present if it ran to its end.
        failure: Present if it did not.
        versions: Versions of zerotune, torch, Python, …
        owner: ``host:pid:start`` of the driver process, to tell a live run from one whose driver died.
        run_dir: Folder with its logs and resolved configuration.
        checkpoint: Path of its last checkpoint, if it saved any.
        steps_done: Optimizer steps it took.
        bench: What a benchmark found; of no other run.
    """

    run_id: str
    kind: RunKind
    status: Status
    config: JobConfig
    workload: Fingerprint
    cluster: Fingerprint
    created: datetime = Field(default_factory=now)
    ended: datetime | None = None
    study: str | None = None
    trial_number: int | None = None
    is_baseline: bool = False
    feasible: bool | None = None
    memory_budget: int | None = None
    measurement: Measurement | None = None
    failure: Failure | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    owner: str | None = None
    run_dir: str | None = None
    checkpoint: str | None = None
    steps_done: int = 0
    bench: BenchReport | None = None


class StudyRecord(Record):
    """A search as the store keeps it.

    Attributes:
        name: Unique name, derived from the question or given by ``--study``.
        fingerprint: The question asked: space, objective, budget, workload, cluster, sampler.
        best: Run id of the winner, once confirmed, until another trial is added.
        speedup: Paired ratio of throughput, winner over baseline, with its interval; ``None`` without a feasible
            baseline.
        is_tie: Whether the interval of the speed-up contains 1.
        confirmed: Every trial that was measured in turns, the winner first; empty until then, and in rows of
            versions that kept the winner alone.
        wall_seconds: Time spent over all sessions of the search.
    """

    name: str
    fingerprint: Fingerprint
    workload: Fingerprint
    cluster: Fingerprint
    objective: str
    memory_budget: int | None = None
    trials_wanted: int
    best: str | None = None
    speedup: Interval | None = None
    is_tie: bool = False
    confirmed: list[Confirmed] = Field(default_factory=list)
    wall_seconds: float = 0.0
    created: datetime = Field(default_factory=now)

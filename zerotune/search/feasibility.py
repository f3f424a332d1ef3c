"""What the sampler is told of a run: a value, or how far it is from the limits.

A failed run is a state, never a number: out of memory is a violated constraint on a pruned trial, so that the
sampler keeps away from that corner; a fault of the machines says nothing about the configuration and is not told.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from zerotune.records import RunRecord, Status

# A run that ran out of memory has no peak; it counts as needing twice what there is.
_OOM_VIOLATION = 1.0


class Outcome(StrEnum):
    """How a trial is told to the sampler."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAIL = "fail"


@dataclass(frozen=True)
class Told:
    """What the sampler is told of one run.

    Attributes:
        outcome: State of the trial.
        values: One per objective, for ``COMPLETE`` only.
        constraints: Always the same keys; above 0 is violated.
    """

    outcome: Outcome
    values: tuple[float, ...]
    constraints: dict[str, float]


def memory_violation(record: RunRecord) -> float:
    """How far a run is over the memory budget, as a share of it; at most 0 within the budget."""
    if record.status.is_oom:
        return _OOM_VIOLATION
    if record.memory_budget is None or record.measurement is None:
        return 0.0
    return (record.measurement.peak_memory_bytes - record.memory_budget) / record.memory_budget


def objective_values(record: RunRecord, objective: str) -> tuple[float, ...]:
    """Values of a measured run, in the order of :func:`directions`."""
    assert record.measurement is not None
    throughput = record.measurement.tokens_per_second.value
    memory = float(record.measurement.peak_memory_bytes)
    return {"throughput": (throughput,), "memory": (memory,), "pareto": (throughput, memory)}[objective]


def directions(objective: str) -> list[Literal["maximize", "minimize"]]:
    """Optuna's directions of an objective."""
    match objective:
        case "throughput":
            return ["maximize"]
        case "memory":
            return ["minimize"]
        case _:
            return ["maximize", "minimize"]


def what_to_tell(record: RunRecord, objective: str) -> Told:
    """Translate the row of a finished run for the sampler."""
    constraints = {
        "memory": memory_violation(record),
        "time": 1.0 if record.status is Status.TIMEOUT else 0.0,
    }
    if record.status is Status.COMPLETE and record.measurement is not None:
        return Told(Outcome.COMPLETE, objective_values(record, objective), constraints)
    if record.status.is_oom or record.status in (Status.TIMEOUT, Status.PRUNED):
        return Told(Outcome.PRUNED, (), constraints)
    return Told(Outcome.FAIL, (), constraints)


def is_feasible(record: RunRecord) -> bool:
    """Whether a run was measured and met the budget, if there is one."""
    return (
        record.status is Status.COMPLETE and record.measurement is not None and record.feasible is not False
    )

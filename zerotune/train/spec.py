"""What a rank is asked to run, and what it answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zerotune.config.schema import JobConfig
from zerotune.records import Ledger, Measurement
from zerotune.records.base import Record


class RunSpec(Record):
    """One run, the same on every rank.

    Attributes:
        job: The configuration; knobs may still hold ``auto``.
        mode: ``measure`` takes steady steps until the measurement is good enough; ``train`` takes ``job.train.steps``.
        run_dir: Folder of this run, on every node.
        warmup_steps: Steps before the first measured one.
        min_steps: Steady steps that are taken at least.
        max_steps: Steady steps that are taken at most.
        half_width: Measuring ends once the 95 % interval's half-width is below this share of the value.
        give_up_below: Tokens per second; measuring ends after ``min_steps`` once the interval lies below it.
        profile_memory: Whether one more, untimed step is profiled for the allocator's peak.
        record_ledger: Whether the ledger of one steady step is recorded.
        resume_from: Folder of checkpoints to continue from.
    """

    job: JobConfig
    mode: Literal["measure", "train"]
    run_dir: str
    warmup_steps: int = 3
    min_steps: int = 10
    max_steps: int = 30
    half_width: float = 0.02
    give_up_below: float | None = None
    profile_memory: bool = True
    record_ledger: bool = True
    resume_from: str | None = None


class RankReport(Record):
    """What one rank answers.

    Attributes:
        rank: Whose.
        job: The configuration as it ran, every ``auto`` a number.
        measurement: The same on every rank.
        ledger: This rank's ledger of one steady step.
        losses: Loss of every step, from step 0 or from where it resumed.
        skipped: Numbers of the steps that changed nothing, because a gradient was not finite.
        first_step: Number of the first step taken here.
        checkpoint: Folder of the last checkpoint saved.
    """

    rank: int
    job: JobConfig
    measurement: Measurement | None = None
    ledger: Ledger | None = None
    losses: list[float]
    skipped: list[int] = Field(default_factory=list)
    first_step: int = 0
    checkpoint: str | None = None

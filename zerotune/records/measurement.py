"""What was measured of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zerotune.records.base import Record


class MemoryUse(Record):
    """Memory of one rank, in bytes.

    Attributes:
        peak: The allocator's peak. On CUDA what the allocator reserved; on CPU the bytes at rest from the ledger
            plus the largest running sum of one profiled, untimed step.
        peak_allocated: The same without what the allocator holds back; equal to ``peak`` on CPU.
        at_rest: Bytes between steps: shards, persistent parameters, gradients, optimizer state, buffers.
        resident_peak: The process's largest resident set.
        peak_live_elements: Largest number of live elements (DESIGN: full parameters, padded, buffers included).
    """

    peak: int
    peak_allocated: int
    at_rest: int
    resident_peak: int
    peak_live_elements: int = 0


class Interval(Record):
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        return (self.high - self.low) / 2 / self.value if self.value else float("inf")

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


class Confirmed(Record):
    """What the confirmation in turns says of one trial.

    Attributes:
        run_id: The trial's row.
        speedup: Paired ratio of throughput, this trial over the reference, with its interval.
        rounds: Rounds it rests on.
        is_reference: Whether ratios are relative to this one: the baseline or, where that does not fit or failed,
            the first feasible trial.
        step_time_s: Median over the rounds of the time of one optimizer step, with its interval.
        tokens_per_second: The same as a rate.
    """

    run_id: str
    speedup: Interval
    rounds: int
    is_reference: bool = False
    step_time_s: Interval
    tokens_per_second: Interval


class Measurement(Record):
    """Time and memory of the steady steps of one run.

    Attributes:
        step_time_s: Median time of one optimizer step, on the slowest rank, with its interval.
        tokens_per_second: Real (not padding) tokens of all ranks and micro-batches per second, with its interval.
        step_times_s: Each steady step, on its slowest rank, seconds.
        tokens_per_step: Real tokens per optimizer step over all ranks.
        warmup_steps: Steps that were run before and are in no figure here.
        stopped_because: The interval became narrow enough, the trial could not win any more, or its budget of
            steps was spent.
        memory: Per rank.
        final_loss: Loss of the last step.
        startup_s: From the start of the run to its first step, seconds.
        sent_elements_per_step: Elements that one rank has to send in one step, from the ledger; zeros that need not
            travel are among them.
        collectives_per_step: Collectives in one step, from the ledger.
    """

    step_time_s: Interval
    tokens_per_second: Interval
    step_times_s: list[float]
    tokens_per_step: float
    warmup_steps: int
    stopped_because: Literal["interval", "cannot_win", "budget"]
    memory: list[MemoryUse] = Field(min_length=1)
    final_loss: float
    startup_s: float
    sent_elements_per_step: int = 0
    collectives_per_step: int = 0

    @property
    def peak_memory_bytes(self) -> int:
        """The peak that a memory budget is held against: the largest over ranks."""
        return max(use.peak for use in self.memory)

    @property
    def is_noisy(self) -> bool:
        """Whether the budget of steps was spent before the interval became narrow enough."""
        return self.stopped_because == "budget"

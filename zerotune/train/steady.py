"""Steady steps: timed, agreed upon by all ranks, and made into a measurement."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from zerotune.engine.group import RankGroup
from zerotune.records import CollectiveKind, Ledger, Measurement, MemoryUse
from zerotune.train import measure
from zerotune.train.loop import Loop
from zerotune.train.measure import StopReason
from zerotune.train.progress import Reporter
from zerotune.train.spec import RunSpec

CHUNK = 5
"""Steps between two exchanges of times, which every rank makes at the same places, outside of the timed steps."""

KEPT = 1000
"""Of a long training the times of as many of its latest steps are kept."""


@dataclass
class Steady:
    """Times of steady steps.

    Attributes:
        times_s: Of each step, on its slowest rank.
        tokens: Real tokens of these steps together, over all ranks.
        reason: Why no more were taken.
    """

    times_s: list[float] = field(default_factory=list)
    tokens: float = 0.0
    reason: StopReason | None = None

    def extend(self, times_s: list[float], tokens: float, group: RankGroup) -> None:
        """Add steps with this rank's times and tokens; collective."""
        rows = group.gather_numbers([*times_s, tokens])
        self.times_s += measure.slowest([row[:-1] for row in rows])
        self.tokens += sum(row[-1] for row in rows)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / len(self.times_s)

    def judge(self, spec: RunSpec) -> None:
        """Decide whether that is enough; every rank holds the same times, so every rank decides alike."""
        self.reason = measure.stop_reason(
            self.times_s,
            self.tokens_per_step,
            min_steps=spec.min_steps,
            max_steps=spec.max_steps,
            half_width=spec.half_width,
            give_up_below=spec.give_up_below,
        )


def measure_steps(loop: Loop, spec: RunSpec, reporter: Reporter) -> Steady:
    """Take steady steps until the measurement is good enough."""
    steady = Steady()
    while steady.reason is None:
        times_s, tokens = [], 0.0
        for _ in range(min(CHUNK, spec.max_steps - len(steady.times_s))):
            times_s.append(loop.timed_step())
            tokens += loop.tokens
            done = len(steady.times_s) + len(times_s)
            reporter.step("measure", loop, spec.max_steps, times_s[-1], done)
        steady.extend(times_s, tokens, loop.group)
        steady.judge(spec)
    return steady


class Stopwatch:
    """Keeps the latest steps' times of a training."""

    def __init__(self) -> None:
        self.steps: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def add(self, seconds: float, tokens: float) -> None:
        self.steps.append((seconds, tokens))

    def steady(self, group: RankGroup, half_width: float) -> Steady | None:
        """What was timed, over all ranks, or ``None`` if nothing was; collective."""
        if not self.steps:
            return None
        steady = Steady()
        steady.extend([seconds for seconds, _ in self.steps], sum(tokens for _, tokens in self.steps), group)
        narrow = measure.median_interval(steady.times_s).relative_half_width < half_width
        steady.reason = "interval" if narrow else "budget"
        return steady


def measurement(
    steady: Steady,
    memory: list[MemoryUse],
    ledger: Ledger | None,
    *,
    warmup_steps: int,
    startup_s: float,
    final_loss: float,
    group: RankGroup,
) -> Measurement:
    """Put everything that was measured together, the same on every rank; collective."""
    assert steady.reason is not None
    step_time = measure.median_interval(steady.times_s)
    return Measurement(
        step_time_s=step_time,
        tokens_per_second=measure.throughput(step_time, steady.tokens_per_step),
        step_times_s=steady.times_s,
        tokens_per_step=steady.tokens_per_step,
        warmup_steps=warmup_steps,
        stopped_because=steady.reason,
        memory=memory,
        final_loss=final_loss,
        startup_s=max(row[0] for row in group.gather_numbers([startup_s])),
        sent_elements_per_step=sent_elements(ledger, group.size) if ledger else 0,
        collectives_per_step=len(ledger.collectives) if ledger else 0,
    )


def sent_elements(ledger: Ledger, ranks: int) -> int:
    """Elements that one rank has to send, zeros among them: (N-1)/N of what is gathered or reduced, twice that for an all-reduce."""
    shares = {CollectiveKind.ALL_REDUCE: 2 * (ranks - 1), CollectiveKind.BROADCAST: ranks}
    return sum(entry.elements * shares.get(entry.kind, ranks - 1) // ranks for entry in ledger.collectives)

"""How much of a search is left: finished trials, time, and what the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from zerotune.records import RunRecord
from zerotune.search.confirm import STEADY_STEPS, WARMUP_STEPS

# What a short measurement costs beside its steps and its set-up: writing rows, handing the task to the ranks.
_HANDLING_S = 0.3


@dataclass
class Budget:
    """Trials and time of a search, over all its sessions.

    Attributes:
        trials: Finished trials wanted.
        time_s: Seconds over all sessions, or ``None``.
        confirmations: Short measurements that the confirmation will take at most.
        spent_s: Seconds that earlier sessions spent.
        clock: Monotonic seconds.
    """

    trials: int
    time_s: float | None
    confirmations: int
    spent_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _trial_seconds: list[float] = field(default_factory=list, init=False)
    _expected_seconds: list[float] = field(default_factory=list, init=False)
    _confirmation_seconds: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def wall_seconds(self) -> float:
        """Over all sessions."""
        return self.spent_s + self.clock() - self._began

    def add_trials(self, records: Iterable[RunRecord]) -> None:
        """Learn from the durations of finished trials, of this session or of earlier ones."""
        for record in records:
            if record.ended is not None:
                self._trial_seconds.append((record.ended - record.created).total_seconds())
            if (measured := record.measurement) is not None:
                steps = (WARMUP_STEPS + STEADY_STEPS) * measured.step_time_s.value
                self._expected_seconds.append(measured.startup_s + steps + _HANDLING_S)

    def add_confirmation(self, record: RunRecord) -> None:
        """Learn from the duration of a short measurement."""
        if record.ended is not None:
            self._confirmation_seconds.append((record.ended - record.created).total_seconds())

    @property
    def _confirmation_s(self) -> float:
        known = self._confirmation_seconds or self._expected_seconds
        return median(known) if known else 0.0

    @property
    def is_overdrawn(self) -> bool:
        """Whether more time is spent than there was."""
        return self.time_s is not None and self.wall_seconds > self.time_s

    def time_is_up(self) -> bool:
        """Whether another trial and the confirmation do not fit into the time any more."""
        if self.time_s is None:
            return False
        one_trial = median(self._trial_seconds) if self._trial_seconds else 0.0
        return self.wall_seconds + one_trial + self.confirmations * self._confirmation_s > self.time_s

    def eta_seconds(self, finished: int) -> float | None:
        """Time to the end from ``finished`` trials on, confirmation included; ``None`` before the first trial."""
        if not self._trial_seconds:
            return None
        left = max(0, self.trials - finished) * median(self._trial_seconds)
        left += self.confirmations * self._confirmation_s
        return left if self.time_s is None else min(left, max(0.0, self.time_s - self.wall_seconds))

    def confirmation_eta_seconds(self, left: int) -> float | None:
        """Time for so many more short measurements."""
        return left * self._confirmation_s or None

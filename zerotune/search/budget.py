"""How much of a search is left: finished trials, time, and what the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from zerotune.records import RunRecord

# Trial, plus what starting one costs, over the same for a short measurement of the confirmation: fewer steps, no
# profiled step, no ledger. Only used until the first confirmation runs were timed.
_CONFIRMATION_SHARE = 0.6


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
    _confirmation_seconds: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def wall_seconds(self) -> float:
        """Over all sessions."""
        return self.spent_s + self.clock() - self._began

    def add_trial(self, seconds: float) -> None:
        self._trial_seconds.append(seconds)

    def add_confirmation(self, seconds: float) -> None:
        self._confirmation_seconds.append(seconds)

    def learn_from(self, records: list[RunRecord]) -> None:
        """Take the durations of trials that earlier sessions finished."""
        for record in records:
            if record.ended is not None:
                self.add_trial((record.ended - record.created).total_seconds())

    @property
    def _confirmation_s(self) -> float:
        if self._confirmation_seconds:
            return median(self._confirmation_seconds)
        return _CONFIRMATION_SHARE * median(self._trial_seconds) if self._trial_seconds else 0.0

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
        return left * self._confirmation_s if self._trial_seconds or self._confirmation_seconds else None

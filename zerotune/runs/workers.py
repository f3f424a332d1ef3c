"""The ranks that run things, as the executor sees them: a group that is started late and replaced when hurt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zerotune.train.context import Progress
from zerotune.train.spec import RankReport, RunSpec

OnProgress = Callable[[Progress], None]


class Workers(Protocol):
    """Ranks that can run a specification."""

    def run(self, spec: RunSpec, step_limit_s: float, on_progress: OnProgress) -> list[RankReport]:
        """Run it on every rank and return their reports in rank order.

        Starts the ranks if there are none, and new ones if the last run hurt them.

        Args:
            spec: What to run.
            step_limit_s: A rank that reports nothing for so long has hung.
            on_progress: Called in the driver with the progress of rank 0.

        Raises:
            GroupFailed: A rank failed; its ``failure`` says which, where and why.
            ResourceError: The ranks cannot be started.
        """

    def close(self) -> None:
        """End all ranks; harmless when called twice."""

"""The ranks that run things: started with the first run, replaced when hurt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from zerotune.cluster.messages import Limits
from zerotune.train.context import Progress
from zerotune.train.spec import RankReport, RunSpec

if TYPE_CHECKING:
    from zerotune.cluster import Cluster, WorkerGroup

OnProgress = Callable[[Progress], None]


class Workers(Protocol):
    """Ranks that can run a specification."""

    def run(self, spec: RunSpec, limits: Limits, on_progress: OnProgress) -> list[RankReport]:
        """Run it on every rank and return their reports in rank order.

        Starts the ranks if there are none, and new ones if the last run hurt them.

        Args:
            spec: What to run.
            limits: How long it may take, phase by phase.
            on_progress: Called in the driver with the progress of rank 0.

        Raises:
            GroupFailed: A rank failed; its ``failure`` says which, where and why.
            ZerotuneError: What a rank raised on purpose; it carries the record as ``failure`` too.
            ResourceError: The ranks cannot be started.
        """

    def close(self) -> None:
        """End all ranks; harmless when called twice."""


class RayWorkers:
    """Ranks on a Ray cluster.

    Args:
        cluster: Where they go; it stays open.
        threads_per_rank: CPU threads of each, if not shared out evenly.
    """

    def __init__(self, cluster: Cluster, threads_per_rank: int | None = None) -> None:
        self._cluster = cluster
        self._threads_per_rank = threads_per_rank
        self._group: WorkerGroup | None = None

    def run(self, spec: RunSpec, limits: Limits, on_progress: OnProgress) -> list[RankReport]:
        from zerotune.train.run import run

        def on_rank(rank: int, progress: Progress) -> None:
            if rank == 0:
                on_progress(progress)

        return self._ready().run(run, spec, run_dir=spec.run_dir, limits=limits, on_progress=on_rank)

    def _ready(self) -> WorkerGroup:
        from zerotune.cluster import WorkerGroup

        if self._group is None:
            self._group = WorkerGroup.start(self._cluster, threads_per_rank=self._threads_per_rank)
        return self._group

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

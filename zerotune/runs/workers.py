"""The ranks that run things: started with the first run, replaced when hurt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from zerotune.cluster.faults import GroupFailed
from zerotune.cluster.messages import Limits
from zerotune.config.errors import RunFailed
from zerotune.records import Failure, Status
from zerotune.train.context import Progress
from zerotune.train.spec import RankReport, RunSpec

if TYPE_CHECKING:
    from zerotune.cluster import Cluster, WorkerGroup

OnProgress = Callable[[Progress], None]
T = TypeVar("T")


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

        return self.call(run, spec, spec.run_dir, limits, on_progress)

    def call(
        self,
        function: Callable[[Any, Any], T],
        argument: Any,
        run_dir: str,
        limits: Limits,
        on_progress: OnProgress,
    ) -> list[T]:
        """Call ``function(context, argument)`` on every rank; otherwise as :meth:`Workers.run`."""

        def on_rank(rank: int, progress: Progress) -> None:
            if rank == 0:
                on_progress(progress)

        return self._ready().run(function, argument, run_dir=run_dir, limits=limits, on_progress=on_rank)

    def _ready(self) -> WorkerGroup:
        """A group whose ranks are up; a start that goes wrong is tried once more.

        Raises:
            GroupFailed: They do not come up; the status is ``not_launched``, for nothing was run.
        """
        for last_try in (False, True):
            try:
                return self._start()
            except RunFailed as error:
                self.close()
                failure = getattr(error, "failure", None)
                if last_try and isinstance(failure, Failure):
                    raise GroupFailed(failure.model_copy(update={"status": Status.NOT_LAUNCHED})) from error
                if last_try:
                    raise
        raise AssertionError("the last try returns or raises")

    def _start(self) -> WorkerGroup:
        from zerotune.cluster import WorkerGroup

        if self._group is None:
            self._group = WorkerGroup.start(self._cluster, threads_per_rank=self._threads_per_rank)
        elif not self._group.healthy:
            self._group.restart()
        return self._group

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

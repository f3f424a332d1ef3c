"""The worker group: ranks that stay up between runs, watched together."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Self

from zerotune.cluster.faults import first_cause, named, raise_fault
from zerotune.cluster.join import Cluster
from zerotune.cluster.messages import JoinWorld, Limits, Listen, RankFault, RankPlace, RunTask
from zerotune.cluster.paths import driver_paths
from zerotune.cluster.placement import create_placement_group, default_threads, order_places
from zerotune.cluster.supervisor import remote_supervisor
from zerotune.cluster.watch import RunWatch
from zerotune.config.errors import PreflightError, ResourceError
from zerotune.train.context import Progress

logger = logging.getLogger(__name__)

SPAWN_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 120.0
SETUP_ATTEMPTS = 3
PLACEMENT_TIMEOUT_S = 30.0


class WorkerGroup:
    """One rank process per place, all in one ``torch.distributed`` world, for any number of runs.

    Attributes:
        places: Where each rank is, by rank.
        healthy: Whether the next run can use the processes as they are. After a run that did not end clean it is
            ``False``, and the next :meth:`run` starts new processes first.
    """

    def __init__(self, cluster: Cluster, threads_per_rank: int | None, run_env: dict[str, str]) -> None:
        self._cluster = cluster
        self._threads_wanted = threads_per_rank
        self._run_env = run_env
        self._placement: Any = None
        self._supervisors: list[Any] = []
        self._threads: list[int] = []
        self.places: list[RankPlace] = []
        self.pids: list[int] = []
        self.healthy = False
        self._closed = False

    @classmethod
    def start(
        cls, cluster: Cluster, *, threads_per_rank: int | None = None, run_env: dict[str, str] | None = None
    ) -> WorkerGroup:
        """Place the ranks, start their processes and connect them.

        Args:
            cluster: Where; its shape says how many.
            threads_per_rank: CPU threads of each rank; by default the cores are shared, 1 where they are scarce.
            run_env: Environment variables for the rank processes.

        Raises:
            ResourceError: The cluster did not give the place that it had free a moment ago.
            PreflightError: A node cannot import zerotune.
            GroupFailed: A process did not start, or the ranks could not reach each other.
        """
        group = cls(cluster, threads_per_rank, dict(run_env or {}))
        try:
            group._place()
            group._connect()
        except BaseException:
            group.close()
            raise
        return group

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def device(self) -> str:
        """Device of a rank, as visible to it."""
        return "cuda:0" if self._cluster.shape.gpu else "cpu"

    @property
    def backend(self) -> str:
        return "nccl" if self._cluster.shape.gpu else "gloo"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------- setting up

    def _place(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        shape = self._cluster.shape
        self._placement = create_placement_group(shape)
        if not self._placement.wait(PLACEMENT_TIMEOUT_S):
            raise ResourceError(
                f"Ray did not place {shape.world_size} ranks within {PLACEMENT_TIMEOUT_S:g} s: {self._cluster.supply()}",
                "something else took the place meanwhile; try again",
            )
        actor = remote_supervisor()
        self._supervisors = [
            actor.options(
                num_cpus=1,
                num_gpus=1 if shape.gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=node
                ),
            ).remote()
            for node in range(shape.nodes)
            for _ in range(shape.procs_per_node)
        ]
        try:
            facts = ray.get([s.describe.remote() for s in self._supervisors], timeout=SPAWN_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            raise ResourceError(
                f"Ray did not start its workers within {SPAWN_TIMEOUT_S:g} s",
                "look into Ray's own logs on the nodes",
            ) from None
        except ray.exceptions.RayError as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise PreflightError(
                f"a node cannot run zerotune: {said[-1] if said else type(error).__name__}",
                "install the same Python, Ray, torch and zerotune on every node",
            ) from error
        self.places = order_places(facts, self._cluster.driver_node)
        self._supervisors = [self._supervisors[place.slot] for place in self.places]
        on_host = Counter(place.ip for place in self.places)
        self._threads = [
            self._threads_wanted or default_threads(on_host[place.ip], facts[place.slot].cores)
            for place in self.places
        ]

    def _connect(self) -> None:
        """Start the rank processes and make them one world; another process may grab a port meanwhile, so twice more."""
        for attempt in range(1, SETUP_ATTEMPTS + 1):
            faults = self._try_connect()
            if not faults:
                self.healthy = True
                return
            cause = first_cause(faults)
            in_use = any(
                "address already in use" in f"{fault.message}{fault.traceback}".lower() for fault in faults
            )
            if not in_use or attempt == SETUP_ATTEMPTS:
                self._kill_ranks()
                raise_fault(cause, self._place_of(cause))
            logger.info("a port was taken while the ranks connected; trying again")

    def _try_connect(self) -> list[RankFault]:
        import ray

        paths = driver_paths()
        spawned = ray.get(
            [
                supervisor.spawn.remote(self._variables(rank), paths, SPAWN_TIMEOUT_S)
                for rank, supervisor in enumerate(self._supervisors)
            ]
        )
        if faults := _faults(spawned):
            return faults
        self.pids = list(spawned)
        head, port = self.places[0], 0
        if self.world_size > 1:
            listening = ray.get(
                self._supervisors[0].listen.remote(Listen(head.ip, self.world_size), SPAWN_TIMEOUT_S)
            )
            if faults := _faults([listening]):
                return faults
            port = listening
        joins = [
            JoinWorld(
                rank=place.rank,
                local_rank=place.local_rank,
                world_size=self.world_size,
                node=place.node_name,
                ip=place.ip,
                device=self.device,
                backend=self.backend,
                threads=threads,
                store_ip=head.ip,
                store_port=port,
            )
            for place, threads in zip(self.places, self._threads, strict=True)
        ]
        refs = [s.join.remote(join, JOIN_TIMEOUT_S) for s, join in zip(self._supervisors, joins, strict=True)]
        waiting = list(refs)
        while waiting:
            # The first rank that fails is not made to wait for those that wait for it.
            done, waiting = ray.wait(waiting, num_returns=1)
            if any(isinstance(answer, RankFault) for answer in ray.get(done)):
                time.sleep(0.5)
                done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
                return [
                    named(answer, rank)
                    for rank, ref in enumerate(refs)
                    if ref in done and isinstance(answer := ray.get(ref), RankFault)
                ]
        return []

    def _variables(self, rank: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self._threads[rank]), "PYTHONUNBUFFERED": "1", **self._run_env}

    # ------------------------------------------------------------------------------------------------- running

    def run(
        self,
        fn: Callable[[Any, Any], Any],
        arg: Any,
        *,
        run_dir: str,
        limits: Limits | None = None,
        on_progress: Callable[[int, Progress], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[Any]:
        """Call ``fn(context, arg)`` on every rank and wait for all of them.

        Args:
            fn: A function that every rank can import; ``context`` is a :class:`zerotune.train.context.RankContext`.
            arg: Anything that can be pickled; the same for every rank.
            run_dir: Folder of this run; rank k writes ``logs/rank<k>.log`` in it.
            limits: How long it may take.
            on_progress: Called with ``(rank, progress)`` for what is new, a few times a second, in this thread.
            cancel: Set from another thread to end the run.

        Returns:
            What each rank returned, by rank.

        Raises:
            ZerotuneError: A rank raised one; it comes with its type, its exit code and ``error.failure``.
            GroupFailed: In every other case that is not success: a rank raised, died, ran out of memory or of time, or
                its node was lost; the run was cancelled. ``failure`` names the first cause.
            KeyboardInterrupt: The user interrupted; the ranks are ended first.
        """
        if fn.__module__ == "__main__":
            raise ValueError(f"{fn.__qualname__} is defined in __main__, where ranks cannot import it from")
        if not self.healthy:
            self.restart()
        task = RunTask(pickle.dumps((fn, arg)), os.path.abspath(run_dir))
        watch = RunWatch(self._supervisors, self.places, limits or Limits(), on_progress, cancel)
        self.healthy = False
        try:
            results = watch.follow(task)
        except BaseException:
            self._kill_ranks()
            raise
        if watch.fault is not None:
            self._kill_ranks()
            raise_fault(watch.fault, self._place_of(watch.fault))
        self.healthy = True
        return [pickle.loads(result) for result in results]

    def restart(self) -> None:
        """Replace every rank process; the old ones are gone before the new ones start.

        Raises:
            GroupFailed: A process did not start, or the ranks could not reach each other.
        """
        import ray

        self.healthy = False
        try:
            ray.get([supervisor.state.remote() for supervisor in self._supervisors], timeout=10.0)
        except ray.exceptions.RayError:
            # A node or a supervisor is lost: everything anew, wherever there is room.
            self._release()
            self._place()
        self._connect()

    def _place_of(self, fault: RankFault) -> RankPlace | None:
        return self.places[fault.rank] if fault.rank is not None else None

    # ------------------------------------------------------------------------------------------------- closing

    def _kill_ranks(self, *, for_good: bool = False, timeout_s: float = 6.0) -> None:
        """End every rank process and wait until they are gone. Supervisors that are gone took theirs with them."""
        import ray

        if not ray.is_initialized():
            return
        calls = [(supervisor.end if for_good else supervisor.kill) for supervisor in self._supervisors]
        with contextlib.suppress(Exception):
            ray.wait([call.remote() for call in calls], num_returns=len(calls), timeout=timeout_s)

    def _release(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        self.places = []
        supervisors, self._supervisors = self._supervisors, []
        placement, self._placement = self._placement, None
        if not ray.is_initialized():
            return
        for supervisor in supervisors:
            with contextlib.suppress(Exception):
                ray.kill(supervisor, no_restart=True)
        if placement is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(placement)

    def close(self) -> None:
        """End the processes and give the place back. Can be called any number of times, also after a fault."""
        self.healthy = False
        try:
            # Before the supervisors have answered once there are no ranks, and they might not answer now either.
            if self.places:
                self._kill_ranks(for_good=True)
        finally:
            self._release()


def _faults(answers: Iterable[Any]) -> list[RankFault]:
    return [named(answer, rank) for rank, answer in enumerate(answers) if isinstance(answer, RankFault)]

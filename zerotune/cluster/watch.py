"""Following one run: all ranks at once, the first cause first, and no rank silent for longer than it may be."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zerotune.cluster.faults import named
from zerotune.cluster.logs import rank_log_path
from zerotune.cluster.messages import Limits, RankFault, RankPlace, RankState, RunTask
from zerotune.records import Status
from zerotune.train.context import Progress

POLL_S = 0.2
GRACE_S = 0.3
COLLATERAL_GRACE_S = 8.0
ANSWER_S = 2.0
NODE_ANSWER_S = 3.0


class RunWatch:
    """One run on a group's supervisors.

    Attributes:
        fault: The first cause, if the run did not end well.
    """

    def __init__(
        self,
        supervisors: list[Any],
        places: list[RankPlace],
        limits: Limits,
        on_progress: Callable[[int, Progress], None] | None,
        cancel: threading.Event | None,
    ) -> None:
        self._supervisors = supervisors
        self._places = places
        self._limits = limits
        self._on_progress = on_progress
        self._cancel = cancel
        self._running: dict[Any, int] = {}
        self._polls: dict[Any, int] = {}
        self._next_poll = [0.0] * len(places)
        self._states = [RankState("running") for _ in places]
        self._changed = [time.monotonic()] * len(places)
        self._results: dict[int, bytes] = {}
        self._faults: list[RankFault] = []
        self._began = time.monotonic()
        self._all_started: float | None = None
        self._run_dir = ""
        self.fault: RankFault | None = None

    def follow(self, task: RunTask) -> list[bytes]:
        """Start the task on every rank and wait for the end: all results by rank, or ``fault`` is set."""
        import ray

        self._run_dir = task.run_dir
        self._began = time.monotonic()
        self._changed = [self._began] * len(self._places)
        self._running = {s.run.remote(task, rank): rank for rank, s in enumerate(self._supervisors)}
        while self._running:
            self._poll_due()
            ready, _ = ray.wait([*self._running, *self._polls], num_returns=1, timeout=POLL_S)
            for ref in ready:
                if ref in self._polls:
                    self._take_state(ref)
                else:
                    self._take_end(ref)
            if self._faults:
                self._settle()
                self.fault = self._cause()
                return []
            if self._cancel is not None and self._cancel.is_set():
                self.fault = RankFault(
                    Status.INTERRUPTED,
                    "the run was cancelled",
                    time.time(),
                    is_clause=False,
                    phase=self._phase(),
                )
                return []
            if overdue := self._overdue():
                self.fault = self._timed_out(overdue)
                return []
        return [self._results[rank] for rank in range(len(self._places))]

    # --------------------------------------------------------------------------------------- progress and its end

    def _poll_due(self) -> None:
        """Ask the supervisors, rank 0's most often: its progress is shown, the others' is a sign of life."""
        now = time.monotonic()
        asked = set(self._polls.values())
        for rank in self._running.values():
            if rank not in asked and now >= self._next_poll[rank]:
                self._polls[self._supervisors[rank].state.remote()] = rank
                self._next_poll[rank] = now + (POLL_S if rank == 0 else 3 * POLL_S)

    def _take_state(self, ref: Any) -> None:
        import ray

        rank = self._polls.pop(ref)
        try:
            state: RankState = ray.get(ref)
        except ray.exceptions.RayError:
            return  # Its run call says the same, with more to it.
        before = self._states[rank]
        self._states[rank] = state
        if (state.count, state.started) != (before.count, before.started):
            self._changed[rank] = time.monotonic()
        if state.count != before.count and state.progress is not None and self._on_progress is not None:
            self._on_progress(rank, state.progress)

    def _take_end(self, ref: Any) -> None:
        import ray

        rank = self._running.pop(ref)
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            answer = self._fault_of_ray(rank, error)
        if isinstance(answer, RankFault):
            self._faults.append(named(answer, rank))
        else:
            self._results[rank] = answer

    def _settle(self) -> None:
        """Wait a moment for other faults: the first that arrives need not be the first that happened."""
        import ray

        began = time.monotonic()
        while self._running:
            only_collateral = all(fault.collateral for fault in self._faults)
            left = began + (COLLATERAL_GRACE_S if only_collateral else GRACE_S) - time.monotonic()
            if left <= 0:
                break
            ready, _ = ray.wait(list(self._running), num_returns=1, timeout=left)
            for ref in ready:
                self._take_end(ref)

    def _cause(self) -> RankFault:
        from zerotune.cluster.faults import first_cause, with_whereabouts

        cause = with_whereabouts(first_cause(self._faults), self._faults)
        if cause.collateral:
            # Nobody else said anything: perhaps a whole node is gone and Ray has not noticed yet.
            for rank, state in self._ask_all(set(self._running.values())).items():
                if state is None:
                    return RankFault(
                        Status.LOST_NODE,
                        "was lost: its node does not answer",
                        time.time(),
                        rank=rank,
                        phase=self._phase(),
                    )
        return cause

    def _fault_of_ray(self, rank: int, error: Exception) -> RankFault:
        """What it means that a supervisor is gone: its node, its memory, or itself."""
        import ray

        text = str(error)
        fault = RankFault(
            Status.FAILED,
            "was lost: Ray's worker that supervised it died",
            time.time(),
            rank=rank,
            phase=self._phase(rank),
            traceback=text,
            log_path=str(rank_log_path(self._run_dir, rank)),
        )
        if (
            isinstance(error, ray.exceptions.OutOfMemoryError)
            or "memory monitor" in text
            or "OutOfMemory" in text
        ):
            return replace(
                fault,
                status=Status.OOM_HOST,
                message="was killed by Ray because the node ran out of memory",
                remedy="fewer ranks per node, a smaller model or micro-batch",
            )
        lost = replace(fault, status=Status.LOST_NODE, message="was lost: its node does not answer any more")
        try:
            ray.get(self._supervisors[rank].state.remote(), timeout=NODE_ANSWER_S)
        except ray.exceptions.ActorUnavailableError:
            return lost if self._still_unavailable(rank) else fault
        except ray.exceptions.ActorDiedError as death:
            return lost if "node has died" in str(death) or not self._node_is_alive(rank) else fault
        except ray.exceptions.RayError:
            return lost
        return fault

    def _still_unavailable(self, rank: int) -> bool:
        """Whether Ray goes on not to reach a supervisor. One that died alone is soon declared dead by its node."""
        import ray

        deadline = time.monotonic() + NODE_ANSWER_S
        while time.monotonic() < deadline:
            time.sleep(0.3)
            try:
                ray.get(self._supervisors[rank].state.remote(), timeout=1.0)
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
                continue
            except ray.exceptions.RayError:
                return not self._node_is_alive(rank)
            return False
        return True

    def _node_is_alive(self, rank: int) -> bool:
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return self._places[rank].node_id in alive

    # -------------------------------------------------------------------------------------------------- time limits

    def _overdue(self) -> str | None:
        """What has taken too long, as words, or ``None``."""
        now = time.monotonic()
        limits = self._limits
        if limits.total_s is not None and now - self._began > limits.total_s:
            return f"it took longer than {limits.total_s:g} s"
        running = list(self._running.values())
        if self._all_started is None:
            if all(state.started for state in self._states):
                self._all_started = now
            elif limits.start_s is not None and now - self._began > limits.start_s:
                return f"not every rank had started after {limits.start_s:g} s"
            return None
        if not any(state.count for state in self._states):
            if limits.first_progress_s is not None and now - self._all_started > limits.first_progress_s:
                return f"no progress after {limits.first_progress_s:g} s"
        elif limits.silence_s is not None:
            for rank in running:
                if self._states[rank].count and now - self._changed[rank] > limits.silence_s:
                    return f"no progress for {limits.silence_s:g} s"
        return None

    def _timed_out(self, reason: str) -> RankFault:
        """Ask everyone what they are doing, have them write their stacks, and name the one that is stuck."""
        import ray

        ranks = set(self._running.values())
        with contextlib.suppress(Exception):
            ray.wait(
                [self._supervisors[rank].dump_stacks.remote() for rank in ranks],
                num_returns=len(ranks),
                timeout=1,
            )
        states = self._ask_all(ranks)
        time.sleep(0.2)  # The stacks are written by the ranks themselves.
        quietest = min(ranks, key=lambda rank: self._changed[rank])
        stopped = [rank for rank, state in states.items() if state is not None and state.process == "stopped"]
        mute = [rank for rank, state in states.items() if state is None]
        culprit = (stopped or mute or [quietest])[0]
        phase = self._phase(culprit)
        message = f"timed out in {phase}: {reason}"
        if stopped:
            message += "; the process is stopped (SIGSTOP)"
        elif mute:
            message += "; its node does not answer"
        return RankFault(
            Status.TIMEOUT,
            message,
            time.time(),
            rank=culprit,
            phase=phase,
            log_path=str(rank_log_path(self._run_dir, culprit)),
            remedy="the logs of all ranks hold their stacks",
        )

    def _ask_all(self, ranks: set[int]) -> dict[int, RankState | None]:
        """The state of each rank, ``None`` where the supervisor does not answer."""
        import ray

        refs = {self._supervisors[rank].state.remote(): rank for rank in ranks}
        if not refs:
            return {}
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=ANSWER_S)
        states: dict[int, RankState | None] = dict.fromkeys(ranks)
        for ref in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                states[refs[ref]] = ray.get(ref)
        return states

    def _phase(self, rank: int = 0) -> str:
        progress = self._states[rank].progress or self._states[0].progress
        return progress.phase if progress is not None else "setup"

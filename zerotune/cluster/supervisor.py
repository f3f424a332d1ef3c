"""The supervisor: one Ray actor per rank, which owns that rank's process.

It runs in its node's placement-group bundle and does nothing itself, so it answers at once whatever its rank does.
Ray does not tell with which signal or exit code a worker ended; the parent of a process is told.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any, TypeVar

from zerotune.cluster.faults import fault_of_exit
from zerotune.cluster.logs import rank_log_path
from zerotune.cluster.messages import (
    Done,
    Joined,
    JoinWorld,
    Listen,
    Listening,
    RankFault,
    RankState,
    Ready,
    Reported,
    RunTask,
    Started,
    SupervisorFacts,
)
from zerotune.cluster.paths import python_path
from zerotune.records import Status

Answer = TypeVar("Answer")


class RankHandle:
    """One rank process as its parent sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._news = threading.Condition()
        self._answers: list[object] = []
        self._death: RankFault | None = None
        self._state = RankState("running")
        self._log_path: str | None = None
        self._stderr = tempfile.TemporaryFile()
        self._kills_before = _kernel_oom_kills()
        self._mine, self._theirs = Pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned = threading.Event()
        threading.Thread(target=self._own, name="rank owner", daemon=True).start()
        self._spawned.wait()

    def _own(self) -> None:
        """Start the process and outlive it: the kernel ends it when the *thread* that started it ends."""
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "zerotune.cluster.rank_process",
                    str(self._theirs.fileno()),
                    str(os.getpid()),
                ],
                env=self._environment,
                pass_fds=[self._theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                start_new_session=True,
            )
        finally:
            self._theirs.close()
            self._spawned.set()
        reader = threading.Thread(target=self._read, name="rank reader", daemon=True)
        reader.start()
        code = self._process.wait()
        # What it sent before it ended is still in the pipe.
        reader.join(timeout=0.5)
        self._kill_session()
        with self._news:
            self._death = fault_of_exit(
                code,
                killed_for_memory=_kernel_oom_kills() > self._kills_before,
                phase=self._state.progress.phase if self._state.progress else None,
                log_path=self._log_path,
            )
            self._state = replace(self._state, process="dead")
            self._news.notify_all()

    def _read(self) -> None:
        while True:
            try:
                message = self._mine.recv()
            except (EOFError, OSError):
                return
            with self._news:
                match message:
                    case Reported(count, progress):
                        self._state = replace(self._state, count=count, progress=progress)
                    case Started():
                        self._state = replace(self._state, started=True)
                    case _:
                        self._answers.append(message)
                        self._news.notify_all()

    def ask(
        self, message: object | None, expected: type[Answer], timeout_s: float | None
    ) -> Answer | RankFault:
        """Send a message and wait for its answer, the rank's fault, or its end."""
        with self._news:
            if isinstance(message, RunTask):
                self._state = RankState("running")
                self._kills_before = _kernel_oom_kills()
            self._answers.clear()
        if message is not None:
            with contextlib.suppress(OSError):  # It is dead; the owner is about to say so.
                self._mine.send(message)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._news:
            while not self._answers and self._death is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    what = type(message).__name__ if message is not None else "start"
                    return RankFault(
                        Status.TIMEOUT,
                        f"did not answer within {timeout_s:g} s ({what})",
                        time.time(),
                        phase="setup",
                    )
                self._news.wait(left)
            if self._answers:
                answer = self._answers.pop(0)
                assert isinstance(answer, (expected, RankFault)), answer
                return answer
            assert self._death is not None
            return self._with_last_words(self._death)

    def _with_last_words(self, death: RankFault) -> RankFault:
        """Before its first run a process has no log file: what it printed then goes into the fault."""
        if self._log_path is not None:
            return death
        self._stderr.seek(0)
        printed = self._stderr.read().decode(errors="replace").strip()
        return replace(death, traceback=printed or None, phase=death.phase or "setup")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log_to(self, path: str) -> None:
        self._log_path = path

    def state(self) -> RankState:
        state = self._state
        if state.process == "running" and _is_stopped(self.pid):
            return replace(state, process="stopped")
        return state

    def dump_stacks(self) -> bool:
        """Make the rank append the stacks of its threads to its log; a stopped process cannot."""
        if self._log_path is None or self.state().process != "running":
            return False
        os.kill(self.pid, signal.SIGUSR1)
        return True

    def kill(self) -> None:
        """End the process and all it started, and wait until it is gone."""
        with self._news:
            if self._death is None:
                self._kill_session()
            self._news.wait_for(lambda: self._death is not None, timeout=5.0)
        self._mine.close()

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class RankSupervisor:
    """The actor. ``serve`` calls wait for the rank; ``watch`` calls never do."""

    def __init__(self) -> None:
        # Out of the terminal's process group: its Ctrl-C is the driver's business.
        with contextlib.suppress(PermissionError):
            os.setsid()
        self._rank: RankHandle | None = None

    def describe(self) -> SupervisorFacts:
        import ray

        context = ray.get_runtime_context()
        ids = context.get_accelerator_ids().get("GPU", [])
        return SupervisorFacts(
            node_id=context.get_node_id(),
            node_name=socket.gethostname(),
            ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            device_ids=tuple(int(number) for number in ids if str(number).isdigit()),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        )

    def spawn(self, variables: dict[str, str], paths: list[str], timeout_s: float) -> int | RankFault:
        """Replace the rank process by a new one; the old one is gone before the new one starts."""
        self.kill()
        environment = {**os.environ, **variables}
        environment["PYTHONPATH"] = python_path(environment.get("PYTHONPATH", ""), paths)
        self._rank = RankHandle(environment)
        ready = self._rank.ask(None, Ready, timeout_s)
        return ready.pid if isinstance(ready, Ready) else ready

    def listen(self, message: Listen, timeout_s: float) -> int | RankFault:
        answer = self._handle().ask(message, Listening, timeout_s)
        return answer.port if isinstance(answer, Listening) else answer

    def join(self, message: JoinWorld, timeout_s: float) -> RankFault | None:
        answer = self._handle().ask(message, Joined, timeout_s)
        return None if isinstance(answer, Joined) else answer

    def run(self, task: RunTask, rank: int) -> bytes | RankFault:
        handle = self._handle()
        handle.log_to(str(rank_log_path(task.run_dir, rank)))
        answer = handle.ask(task, Done, None)
        return answer.result if isinstance(answer, Done) else answer

    def state(self) -> RankState:
        return self._rank.state() if self._rank else RankState("dead")

    def dump_stacks(self) -> bool:
        return self._rank.dump_stacks() if self._rank else False

    def kill(self) -> None:
        if self._rank is not None:
            self._rank.kill()
            self._rank = None

    def _handle(self) -> RankHandle:
        assert self._rank is not None, "spawn comes first"
        return self._rank


def remote_supervisor() -> Any:
    """The actor class, for Ray to create."""
    import ray

    groups = {"serve": 1, "watch": 2}
    cls = RankSupervisor
    for name in ("spawn", "listen", "join", "run", "describe"):
        setattr(cls, name, ray.method(concurrency_group="serve")(getattr(cls, name)))
    for name in ("state", "dump_stacks", "kill"):
        setattr(cls, name, ray.method(concurrency_group="watch")(getattr(cls, name)))
    return ray.remote(concurrency_groups=groups, max_restarts=0, max_task_retries=0)(cls)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _kernel_oom_kills() -> int:
    """How many processes the kernel has killed for memory since it booted; 0 where it does not say."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0

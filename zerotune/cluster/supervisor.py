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
from zerotune.cluster.rank_process import IMPORTED, NUMBER
from zerotune.records import Status

Answer = TypeVar("Answer")


class Template:
    """The process that forks ranks: see :func:`zerotune.cluster.rank_process.main`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - read when a process ends early
        self._mine, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned = threading.Event()
        threading.Thread(target=self._own, name="template owner", daemon=True).start()
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
                stdout=self._printed,
                stderr=self._printed,
                start_new_session=True,
            )
        finally:
            self._theirs.close()
            self._spawned.set()
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_imported(self, timeout_s: float) -> bool:
        """Whether it has imported torch and can fork; to be called once."""
        self._mine.settimeout(timeout_s)
        try:
            return self._mine.recv(1) == IMPORTED
        except OSError:
            return False
        finally:
            self._mine.settimeout(None)

    def fork(self, descriptor: int) -> int | None:
        """Fork a rank that owns a copy of ``descriptor``: its process number, or ``None`` if the template is gone."""
        try:
            socket.send_fds(self._mine, [b"F"], [descriptor])
        except OSError:
            return None
        return self._number()

    def wait_exit(self) -> int:
        """Wait until the forked rank ends: its exit code, negative for a signal; the template's own if that died."""
        code = self._number()
        if code is None:
            assert self._process is not None
            return self._process.wait()
        return code

    def _number(self) -> int | None:
        data = b""
        while len(data) < NUMBER.size:
            try:
                more = self._mine.recv(NUMBER.size - len(data))
            except OSError:
                return None
            if not more:
                return None
            data += more
        return int(NUMBER.unpack(data)[0])

    def printed(self) -> str:
        """What it, and ranks without a log file yet, have printed."""
        self._printed.seek(0)
        return self._printed.read().decode(errors="replace").strip()

    def end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        self._mine.close()


class RankHandle:
    """One rank process as its supervisor sees it."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._news = threading.Condition()
        self._answers: list[object] = []
        self._death: RankFault | None = None
        self._state = RankState("running")
        self._log_path: str | None = None
        self._kills_before = _kernel_oom_kills()
        self._mine, theirs = Pipe()
        self._pid = template.fork(theirs.fileno())
        theirs.close()
        threading.Thread(target=self._await_end, name="rank end", daemon=True).start()

    def _await_end(self) -> None:
        reader = threading.Thread(target=self._read, name="rank reader", daemon=True)
        reader.start()
        code = self._template.wait_exit()
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
        return replace(death, traceback=self._template.printed() or None, phase=death.phase or "setup")

    @property
    def pid(self) -> int | None:
        return self._pid

    def log_to(self, path: str) -> None:
        self._log_path = path

    def state(self) -> RankState:
        state = self._state
        if state.process == "running" and self._pid is not None and _is_stopped(self._pid):
            return replace(state, process="stopped")
        return state

    def dump_stacks(self) -> bool:
        """Make the rank append the stacks of its threads to its log; a stopped process cannot."""
        if self._log_path is None or self._pid is None or self.state().process != "running":
            return False
        os.kill(self._pid, signal.SIGUSR1)
        return True

    def kill(self) -> None:
        """End the process and all it started, and wait until it is gone."""
        with self._news:
            if self._death is None:
                self._kill_session()
            self._news.wait_for(lambda: self._death is not None, timeout=5.0)
        self._mine.close()

    def _kill_session(self) -> None:
        if self._pid is None:
            return
        # A rank is the leader of its session; in its first moments it is not yet.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._pid, signal.SIGKILL)


class RankSupervisor:
    """The actor. ``serve`` calls wait for the rank; ``watch`` calls never do."""

    def __init__(self) -> None:
        # Out of the terminal's process group: its Ctrl-C is the driver's business.
        with contextlib.suppress(PermissionError):
            os.setsid()
        self._template: Template | None = None
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
        """Replace the rank process by a new one; the old one is gone before the new one starts.

        ``variables`` and ``paths`` count when the first is started.
        """
        self.kill()
        if self._template is None or not self._template.is_alive:
            environment = {**os.environ, **variables}
            environment["PYTHONPATH"] = python_path(environment.get("PYTHONPATH", ""), paths)
            self._template = Template(environment)
            if not self._template.wait_imported(timeout_s):
                printed = self._template.printed()
                self._template.end()
                last = printed.splitlines()[-1] if printed else f"nothing was heard of it for {timeout_s:g} s"
                return RankFault(
                    Status.FAILED,
                    f"could not be started: {last}",
                    time.time(),
                    phase="setup",
                    traceback=printed,
                )
        self._rank = RankHandle(self._template)
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
        """End the rank process, if there is one, and wait until it is gone."""
        if self._rank is not None:
            self._rank.kill()
            self._rank = None

    def end(self) -> None:
        """End everything that was started here."""
        self.kill()
        if self._template is not None:
            self._template.end()
            self._template = None

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
    for name in ("state", "dump_stacks", "kill", "end"):
        setattr(cls, name, ray.method(concurrency_group="watch")(getattr(cls, name)))
    options: dict[str, Any] = {"concurrency_groups": groups, "max_restarts": 0, "max_task_retries": 0}
    return ray.remote(**options)(cls)


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

"""Ranks for tests: one pool of processes per world size, kept for the whole session.

Importing torch for every case would cost more than the cases, and for every process more than the process: they are
forked from one that has imported it, and runs nothing. Every task has a hard limit; when it is reached, all
ranks' stacks are printed, the pool is killed, and the next task gets a new one.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

DEFAULT_LIMIT_S = 60.0
PRELOADED = ["torch", "zerotune", "zerotune.zero.engine", "tests.checkpoints.jobs", "tests.cases.harness"]
START_LIMIT_S = 170.0


class RankError(AssertionError):
    """A rank raised, died or did not answer in time."""


def _serve(rank: int, size: int, store_file: str, stack_file: str, tasks: Any, answers: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stacks = open(stack_file, "w")  # noqa: SIM115 - stays open for the handler
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    if size > 1:
        store = dist.FileStore(store_file, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        task = tasks.get()
        if task is None:
            break
        function, args = task
        try:
            torch.manual_seed(0)
            answers.put((rank, True, function(rank, size, *args)))
        except BaseException:
            answers.put((rank, False, traceback.format_exc()))


class RankPool:
    """``size`` processes in one gloo group.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        context = forkserver()
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        root = Path(self._folder.name)
        self._stacks = [root / f"stack{rank}" for rank in range(size)]
        self._tasks = [context.Queue() for _ in range(size)]
        self._answers = context.Queue()
        self._processes = [
            context.Process(
                target=_serve,
                args=(
                    rank,
                    size,
                    str(root / "store"),
                    str(self._stacks[rank]),
                    self._tasks[rank],
                    self._answers,
                ),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any, limit: float = DEFAULT_LIMIT_S) -> list[Any]:
        """Run ``function(rank, size, *args)`` on every rank; returns their answers in rank order.

        Raises:
            RankError: A rank raised, died, or the limit was reached.
        """
        for tasks in self._tasks:
            tasks.put((function, args))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while len(answers) < self.size:
            try:
                rank, is_fine, answer = self._answers.get(timeout=0.5)
            except queue.Empty:
                dead = [p for p in self._processes if not p.is_alive()]
                if dead or time.monotonic() > deadline:
                    stacks = self._all_stacks()
                    self.close(force=True)
                    why = (
                        f"a rank died ({[p.exitcode for p in dead]})"
                        if dead
                        else f"no answer within {limit} s"
                    )
                    raise RankError(f"{why}\n{stacks}") from None
                continue
            if not is_fine:
                self.close(force=True)
                raise RankError(f"rank {rank} raised:\n{answer}")
            answers[rank] = answer
        return [answers[rank] for rank in range(self.size)]

    def _all_stacks(self) -> str:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"--- rank {rank}\n{path.read_text()}" for rank, path in enumerate(self._stacks))

    def close(self, force: bool = False) -> None:
        """End the processes."""
        if _POOLS.get(self.size) is self:
            del _POOLS[self.size]
        for process, tasks in zip(self._processes, self._tasks, strict=True):
            if force:
                process.kill()
            else:
                tasks.put(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def forkserver() -> Any:
    """The context of processes that need not import torch again."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


_POOLS: dict[int, RankPool] = {}


def _import_engine(rank: int, size: int) -> None:
    import zerotune.zero.engine  # noqa: F401


def run_on_ranks(
    size: int, function: Callable[..., Any], *args: Any, limit: float = DEFAULT_LIMIT_S
) -> list[Any]:
    """Run a module-level function on ``size`` ranks of the session's pool."""
    if size not in _POOLS:
        _POOLS[size] = RankPool(size)
        _POOLS[size].run(
            _import_engine, limit=START_LIMIT_S
        )  # on a busy machine starting is no hang of the task's
    return _POOLS[size].run(function, *args, limit=limit)


def end_pool(size: int) -> None:
    """End the session's pool of that size, after tasks that leave something behind in its processes."""
    if size in _POOLS:
        _POOLS[size].close()


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS.values()):
        pool.close()

"""Callables for ranks: what well and badly behaved runs look like from the worker group."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from zerotune.config.errors import UsageError
from zerotune.train.context import Progress


def _reduce() -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    return float(tensor[0])


def facts(context: Any, arg: Any) -> dict[str, Any]:
    """Sums over the ranks and tells where it is."""
    import torch

    print(f"printed by rank {context.rank}")
    context.report(Progress(phase="train", step=1, loss=2.5))
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "sum": _reduce() if context.world_size > 1 else 1.0,
        "rank": context.rank,
        "local_rank": context.local_rank,
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "device": context.device,
        "modules": sorted(sys.modules),
        "arg": arg,
        "environment": os.environ.get("CLUSTER_TEST"),
    }


def trouble(context: Any, arg: dict[str, Any]) -> int:
    """Trains for a while; at step 3 one rank gets into trouble of the kind ``arg["kind"]``."""
    for step in range(arg.get("steps", 400)):
        context.report(Progress(phase="train", step=step))
        if step == 3 and context.rank == arg.get("rank", 1):
            _get_into_trouble(arg["kind"])
        _reduce()
        time.sleep(0.02)
    return step


def _get_into_trouble(kind: str) -> None:
    import torch

    match kind:
        case "raise":
            raise ValueError("boom\nwith a second line")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit0":
            os._exit(0)
        case "sysexit":
            sys.exit(0)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "silent":
            time.sleep(600)
        case "oom":
            raise torch.OutOfMemoryError("tried to allocate 12.00 GiB")
        case "allocator":
            torch.empty(2**52)
        case "memory":
            raise MemoryError
        case "usage":
            raise UsageError("the factory is wrong", "mend it")
        case "unpicklable":
            raise type("Local", (Exception,), {"__reduce__": lambda self: 1 / 0})("cannot travel")


def wait_for_ever(context: Any, arg: Any) -> None:
    """Reports every 50 ms and never ends."""
    step = 0
    while True:
        step += 1
        context.report(Progress(phase="train", step=step))
        time.sleep(0.05)


def unpicklable_result(context: Any, arg: Any) -> Any:
    return lambda: None


def spawn_child(context: Any, arg: Any) -> int:
    """Starts a process that outlives the run, as a data loader may."""
    import subprocess

    return subprocess.Popen(["sleep", "300"]).pid


def wait_or_reduce(context: Any, arg: Any) -> None:
    """Reduces for ever."""
    step = 0
    while True:
        step += 1
        context.report(Progress(phase="train", step=step))
        _reduce()
        time.sleep(0.02)

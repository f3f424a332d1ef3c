"""Who drives a run, and whether that process still lives."""

from __future__ import annotations

import os
import socket

import psutil

# The start time of a process is derived from the boot time, which moves by fractions of a second when the clock is set.
_START_TOLERANCE_S = 2.0


def this_owner() -> str:
    """``host:pid:start`` of this process; the start time tells a reused pid from the original."""
    process = psutil.Process(os.getpid())
    return f"{socket.gethostname()}:{process.pid}:{process.create_time():.2f}"


def is_alive(owner: str | None) -> bool | None:
    """Whether the process that ``owner`` names still runs; ``None`` if it cannot be seen from this host."""
    if owner is None:
        return False
    try:
        host, pid, start = owner.rsplit(":", 2)
        number, started = int(pid), float(start)
    except ValueError:
        return False
    if host != socket.gethostname():
        return None
    try:
        process = psutil.Process(number)
        same = abs(process.create_time() - started) <= _START_TOLERANCE_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True

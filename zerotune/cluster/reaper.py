"""A small process that ends what is left of our Ray after a driver that was killed.

The kernel ends Ray's head and raylets with the driver, and raylets take their workers along; Ray's agents, which are
started by the raylet, stay for a minute or more. This process looks at who belongs to our Ray while the driver lives
(they carry :data:`MARK` in their environment, or descend from one that does), and ends exactly those afterwards.

Run as ``python -m zerotune.cluster.reaper MARK DRIVER_PID``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import psutil

MARK = "ZEROTUNE_RAY_OWNER"
LOOK_S = 0.5
FULL_LOOK_S = 3.0
GONE_WITHIN_S = 6.0


def belongs(process: psutil.Process, mark: str, known: set[psutil.Process]) -> bool:
    """Whether a process is part of our Ray."""
    try:
        if process in known:
            return True
        if process.environ().get(MARK) == mark:
            return True
        parent = process.parent()
        return parent is not None and parent in known
    except (psutil.Error, OSError):
        return False


def look(candidates: list[psutil.Process], mark: str, known: set[psutil.Process]) -> None:
    """Add to ``known``; parents come before their children in ``candidates`` or are known already."""
    me = psutil.Process()
    for process in candidates:
        if process != me and belongs(process, mark, known):
            known.add(process)


def reap(mark: str, known: set[psutil.Process]) -> None:
    """End all of ours, and who joined them meanwhile. A process number that was given anew is not touched."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < deadline:
        look(list(psutil.process_iter()), mark, known)
        alive = [
            process for process in known if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]
        if not alive:
            return
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=0.5)


def watch(mark: str, driver_pid: int) -> None:
    """Look on until the driver says that it has cleaned up itself (a line on standard input), or is gone."""
    import select

    known: set[psutil.Process] = set()
    last = 0.0
    while os.getppid() == driver_pid:
        readable, _, _ = select.select([sys.stdin], [], [], LOOK_S)
        if readable:
            if sys.stdin.readline():
                return
            break  # Its end of the pipe is closed: it is gone.
        # The first seconds bring the most; later only workers come and go, which die with their raylet.
        if time.monotonic() - last > (LOOK_S if len(known) < 8 else FULL_LOOK_S):
            last = time.monotonic()
            with contextlib.suppress(psutil.Error):
                look(psutil.Process(driver_pid).children(recursive=True), mark, known)
    reap(mark, known)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        watch(sys.argv[1], int(sys.argv[2]))

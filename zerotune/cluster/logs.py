"""Every rank writes its own log file: Python's logging, what user code prints, and what dies in C."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def rank_log_path(run_dir: str, rank: int) -> Path:
    """``<run_dir>/logs/rank<k>.log``."""
    return Path(run_dir) / "logs" / f"rank{rank}.log"


def route_output(path: Path) -> None:
    """Send standard output, standard error and logging of this process to ``path``, appending.

    The file descriptors themselves are replaced, so that libraries written in C and the fault handler write there
    too. SIGUSR1 makes the process append the stacks of all its threads, even if it is stuck in C.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # User code that prints must be seen at once, not when 8 KiB are full.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2, all_threads=True)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    logging.basicConfig(level=logging.INFO, format=FORMAT, stream=sys.stderr, force=True)


def tail(path: Path, lines: int = 40) -> str:
    """The last lines of a log, or nothing where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 400 * lines))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])

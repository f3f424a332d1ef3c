"""Ctrl-C at a moment when it would do harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold a Ctrl-C back until the block has ended; a second one is not held back.

    Ray's core, interrupted while it connects, ends the whole process with a segmentation fault at exit.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    pending = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            signal.signal(signal.SIGINT, before)
            signal.raise_signal(signal.SIGINT)
        pending = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            signal.raise_signal(signal.SIGINT)

"""Ctrl-C, SIGTERM and a closed terminal: one orderly end, however often they come."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from zerotune.cli.console import say
from zerotune.config.errors import ExitCode

_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class Interrupted(KeyboardInterrupt):
    """The user or the system ends the command.

    A ``KeyboardInterrupt``, so that whatever cleans up after Ctrl-C cleans up after SIGTERM too.
    """

    def __init__(self, exit_code: ExitCode) -> None:
        super().__init__()
        self.exit_code = exit_code


class Interrupts:
    """Turns the first signal into an exception and keeps the later ones from disturbing the clean-up."""

    def __init__(self) -> None:
        self._seen = 0

    def arm(self) -> None:
        """Handle the signals; again after a library has put its own handlers in place."""
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._seen += 1
        code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
        if self._seen == 1:
            raise Interrupted(code)
        if self._seen == 2:
            # Only what is safe in a handler: the streams of Python may be in use right now.
            os.write(
                sys.__stderr__.fileno() if sys.__stderr__ else 2, b"closing workers; once more to quit now\n"
            )
            return
        os._exit(code)


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Handle signals inside, and put the old handlers back afterwards."""
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    interrupts = Interrupts()
    interrupts.arm()
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def says_how_to_go_on(how: str) -> Iterator[None]:
    """End a command that is interrupted inside with one line and the right exit code.

    Args:
        how: What is kept, and how to go on.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        code = getattr(stop, "exit_code", ExitCode.INTERRUPTED)
        say(f"{'terminated' if code == ExitCode.TERMINATED else 'interrupted'}: {how}")
        raise typer.Exit(code) from None

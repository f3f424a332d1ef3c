"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let the programs that tests start be interrupted.

    A shell starts its background jobs with SIGINT ignored, and whatever they start inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

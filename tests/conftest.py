"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    """Let the programs that tests start be interrupted.

    A shell starts its background jobs with SIGINT ignored, and whatever they start inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_outer_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """How wide the terminal is in which the tests run is not their business."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)


_USES_RANKS = ("cases", "checkpoints", "fuzz", "zero")
"""Folders of tests that train on ranks for most of their time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests stay together, in order, when two workers share them (``make test``).

    Tests that train on ranks use every core, so one worker runs them all, while the other runs those that do not, and
    those that mostly wait for Ray, which would find one another's clusters.
    """
    for item in items:
        if item.path.parent.name in _USES_RANKS:
            group = "ranks"
        else:
            group = "ray" if item.get_closest_marker("ray") else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))

from __future__ import annotations

import os
import socket
import subprocess
import sys

from zerotune.runs.owner import is_alive, this_owner


def test_this_process_is_alive() -> None:
    assert is_alive(this_owner()) is True


def test_a_process_that_ended_is_not() -> None:
    code = "from zerotune.runs.owner import this_owner; print(this_owner())"
    owner = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert owner.split(":")[1].isdigit()
    assert is_alive(owner) is False


def test_a_reused_pid_is_another_process() -> None:
    assert is_alive(f"{socket.gethostname()}:{os.getpid()}:1000.00") is False


def test_another_host_cannot_be_seen_from_here() -> None:
    assert is_alive("elsewhere.example:1:1000.00") is None


def test_nonsense_is_nobody() -> None:
    for owner in (None, "", "x", "a:b:c"):
        assert is_alive(owner) is False

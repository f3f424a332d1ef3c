"""The driver is killed or interrupted: nothing of ours may be left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(90)]
HERE = Path(__file__).parent


def start_driver(tmp_path: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A driver with two running ranks, and every process that it has."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "driver_program.py"), str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None and driver.stderr is not None
    line = driver.stdout.readline()
    assert line.startswith("["), line + driver.stderr.read()
    processes = []
    for pid, created in json.loads(line):
        process = psutil.Process(pid)
        assert process.create_time() == created
        processes.append(process)
    assert len(processes) >= 8, "Ray's own, two supervisors, two templates, two ranks"
    return driver, processes


def left_after(processes: list[psutil.Process], seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while True:
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not alive or time.monotonic() > deadline:
            return [f"{p.pid} {' '.join(p.cmdline())[:80]}" for p in alive]
        time.sleep(0.1)


def test_kill_9_of_the_driver(tmp_path: Path) -> None:
    driver, processes = start_driver(tmp_path)
    driver.kill()
    driver.wait()
    assert left_after(processes, 10.0) == []


def test_ctrl_c(tmp_path: Path) -> None:
    driver, processes = start_driver(tmp_path)
    os.killpg(driver.pid, signal.SIGINT)  # As a terminal does: to all of the foreground process group.
    output, errors = driver.communicate(timeout=20)
    assert driver.returncode == 130
    assert output.strip() == "interrupted"
    assert errors == "", "neither Ray nor a rank prints anything"
    assert left_after(processes, 10.0) == []

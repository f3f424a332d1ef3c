"""Where the driver finds modules that are not installed, for the processes that it starts."""

from __future__ import annotations

import os
import sys
from typing import Any


def driver_paths() -> list[str]:
    """The driver's folder, and what stands on its path beside Python's own."""
    own = tuple(os.path.realpath(prefix) + os.sep for prefix in {sys.prefix, sys.base_prefix})
    entries = [os.getcwd(), *(os.path.abspath(entry or ".") for entry in sys.path)]
    return [entry for entry in dict.fromkeys(entries) if not os.path.realpath(entry).startswith(own)]


def python_path(inherited: str, entries: list[str]) -> str:
    """``PYTHONPATH`` with ``entries`` first and what was there before behind them."""
    before = [entry for entry in inherited.split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys([*entries, *before]))


def job_config() -> Any:
    """Ray's settings for this driver: its workers find the modules where the driver does."""
    from ray.job_config import JobConfig

    config = JobConfig()
    # Ray itself sends on the script's folder and the current one.
    config._py_driver_sys_path.extend(driver_paths())
    return config

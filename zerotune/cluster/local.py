"""A Ray of our own on this machine, for as long as the driver lives."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from zerotune.cluster.interrupts import deferred_interrupt
from zerotune.cluster.paths import driver_paths, job_config, python_path
from zerotune.cluster.reaper import MARK

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 * 2**20  # Only small results travel through it.
MIN_SLOTS = 4


def local_slots() -> int:
    """CPU slots of each node that we start: the cores, but at least 4, so that a laptop can try several ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(MIN_SLOTS, cores)


class LocalRay:
    """Ray processes that we started and that we end.

    Start it from the main thread, or from one that lives as long as the driver: on Linux, Ray's processes are ended
    by the kernel when the thread that started them ends.
    """

    def __init__(self) -> None:
        self._reaper: subprocess.Popen[bytes] | None = None
        self._extra_nodes: list[Any] = []
        self._session: Path | None = None

    def start(self, nodes: int, slots: int) -> None:
        """Start ``nodes`` raylets with ``slots`` CPU slots each. It is not announced to other programs.

        Raises:
            RuntimeError: Ray did not start; its own words are in the message.
        """
        mark = secrets.token_hex(8)
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "zerotune.cluster.reaper", mark, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=_reaper_environment(),
        )
        _require_token()
        os.environ[MARK] = mark
        try:
            import ray

            # More than one node on this machine is for trying: its GPUs would be counted once per node.
            with deferred_interrupt():
                ray.init(
                    address="local",
                    num_cpus=slots,
                    num_gpus=0 if nodes > 1 else None,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    job_config=job_config(),
                )
            head: Any = ray._private.worker._global_node
            self._session = Path(head.get_session_dir_path())
            for _ in range(nodes - 1):
                self._add_node(head.gcs_address, slots)
        finally:
            os.environ.pop(MARK, None)

    def _add_node(self, address: str, slots: int) -> None:
        """One more raylet, as :class:`ray.cluster_utils.Cluster` adds it, which would announce itself machine-wide."""
        from ray._private.node import Node
        from ray._private.parameter import RayParams
        from ray._private.services import wait_for_node

        parameters = RayParams(
            gcs_address=address,
            num_cpus=slots,
            num_gpus=0,
            object_store_memory=OBJECT_STORE_BYTES,
            min_worker_port=0,
            max_worker_port=0,
            node_manager_port=0,
        )
        parameters.include_log_monitor = False  # type: ignore[assignment]  # Its annotation is wrong.
        parameters.dashboard_agent_listen_port = None
        node = Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=True)
        self._extra_nodes.append(node)
        wait_for_node(node.gcs_address, node.plasma_store_socket_name, 30)

    def stop(self) -> None:
        """End every process that was started here. Can be called any number of times."""
        import ray

        with contextlib.suppress(Exception):
            ray.shutdown(wait_for_processes=True)
        while self._extra_nodes:
            with contextlib.suppress(Exception):
                self._extra_nodes.pop().kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        reaper, self._reaper = self._reaper, None
        if reaper is not None and reaper.stdin is not None:
            # Its turn: agents may outlive their raylet for a while. It ends by itself when nothing is left.
            with contextlib.suppress(OSError):
                reaper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                reaper.wait(timeout=8.0)
        if self._session is not None:
            shutil.rmtree(self._session, ignore_errors=True)
            self._session = None


def _require_token() -> None:
    """Let only this driver and its children use the Ray it starts: whoever can reach it could run code.

    Ray would write a token into the user's home folder; one of our own, in memory only, does as well. What the
    user has set up stands.
    """
    given = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in given):
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if "ray" in sys.modules:
        import ray._raylet as raylet

        raylet.Config.initialize("")  # type: ignore[attr-defined]  # Ray reads its settings when it is imported.


def _reaper_environment() -> dict[str, str]:
    path = python_path(os.environ.get("PYTHONPATH", ""), driver_paths())
    return {**os.environ, "PYTHONPATH": path}

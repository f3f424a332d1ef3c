"""Joining a cluster: an address, a running Ray found by itself, or a new one on this machine; and which it was."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from zerotune.cluster.interrupts import deferred_interrupt
from zerotune.cluster.local import LocalRay, local_slots
from zerotune.cluster.messages import WorldShape
from zerotune.cluster.paths import job_config
from zerotune.cluster.supply import (
    DEFAULT_PROCS_WITHOUT_GPUS,
    Demand,
    describe,
    fitting,
    holders,
    needed,
    read_nodes,
    resolve_shape,
)
from zerotune.config.errors import ResourceError

logger = logging.getLogger(__name__)

TCP_TIMEOUT_S = 3.0
PROBE_TIMEOUT_S = 8.0
INIT_TIMEOUT_S = 20.0
LINE_EVERY_S = 5.0

_TWO_NODES = (
    "start one Ray of {nodes} machines: `ray start --head --port=6379` on this one, `ray start --address=THIS_HOST:6379` "
    "on the other, then run this again; or, for trying, --local-nodes {nodes}"
)


@dataclass(frozen=True)
class PlacementRequest:
    """Where a job wants to run.

    Attributes:
        nodes: How many nodes; ``None`` takes all.
        procs_per_node: Ranks per node; by default one per GPU, or 2 where there are none.
        local_nodes: Start this many Ray nodes on this machine instead of joining one, for trying.
        address: ``host:port`` of a running Ray, ``auto``, or ``local``; by default ``$RAY_ADDRESS``, else a running
            Ray on this machine, else a new one.
        wait_s: How long to wait for nodes that are not there yet or busy.
    """

    nodes: int | None = None
    procs_per_node: int | None = None
    local_nodes: int | None = None
    address: str | None = None
    wait_s: float = 60.0


class Cluster:
    """A Ray that this process is connected to, with room for the job.

    Attributes:
        description: One line that says which Ray this is.
        shape: How many ranks the job gets, and on how many nodes.
        address: ``host:port``.
        driver_node: Ray's id of the node that this process runs on.
    """

    def __init__(self, local: LocalRay | None, connected_here: bool) -> None:
        import ray

        self._local = local
        self._connected_here = connected_here
        self._closed = False
        self.description = ""
        self.shape = WorldShape(1, 1)
        self.address: str = ray.get_runtime_context().gcs_address
        self.driver_node: str = ray.get_runtime_context().get_node_id()

    @property
    def is_ours(self) -> bool:
        """Whether this process started the Ray, and ends it."""
        return self._local is not None

    @property
    def world_size(self) -> int:
        return self.shape.world_size

    def supply(self) -> str:
        """What is there, what is free, and who holds the rest."""
        nodes = read_nodes()
        held = holders()
        line = f"needed: {needed(self.shape)}; present: {describe(nodes)}; free: {describe(nodes, free=True)}"
        return f"{line}; held by {', '.join(held)}" if held else line

    def close(self) -> None:
        """Leave the Ray, and end it if it is ours. Can be called any number of times."""
        if self._closed:
            return
        if self._local is not None:
            self._local.stop()
        elif self._connected_here:
            import ray

            with contextlib.suppress(Exception):
                ray.shutdown()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(request: PlacementRequest, on_wait: Callable[[str], None] | None = None) -> Cluster:
    """Join or start a Ray, and make sure that the job has room there.

    Call it from the main thread: see :class:`zerotune.cluster.local.LocalRay`.

    Args:
        request: What the job wants.
        on_wait: Told a line now and then while nodes are missing or busy.

    Raises:
        ResourceError: There is no Ray at the address, or no room within ``wait_s``; the message says what is needed,
            present and free.
    """
    address = request.address or os.environ.get("RAY_ADDRESS") or None
    with _kept_sigterm():
        _quiet_ray()
        if _is_initialized():
            cluster = _stay_connected(address)
        elif request.local_nodes is not None or address == "local":
            cluster = _start_local(request, request.local_nodes or 1)
        else:
            found = address if address not in (None, "auto") else _discover()
            if found is None and address == "auto":
                raise ResourceError(
                    "no running Ray was found on this machine",
                    "start one with `ray start --head`, or leave out --address",
                )
            if found is not None:
                cluster = _connect(found)
            else:
                cluster = _start_local(request, 1)
    try:
        _wait_for_room(cluster, request, on_wait or (lambda line: None))
    except BaseException:
        cluster.close()
        raise
    return cluster


# --------------------------------------------------------------------------------------------------- the three ways


def check_local(request: PlacementRequest, nodes: int, slots: int) -> None:
    """Refuse what a Ray of ``nodes`` nodes with ``slots`` CPU slots each cannot give, before it is started.

    Raises:
        ResourceError: With what is needed, present and free.
    """
    procs = request.procs_per_node
    if request.nodes is not None and request.nodes > nodes:
        raise ResourceError(
            f"needed: {request.nodes} nodes; present: {nodes} (no running Ray was found, so this machine is all there is)",
            _TWO_NODES.format(nodes=request.nodes),
        )
    if (procs or DEFAULT_PROCS_WITHOUT_GPUS) > slots:
        raise ResourceError(
            f"needed: {procs} CPU slots on one node; present: {slots}; free: {slots} "
            "(a Ray that is started here offers as many slots as there are cores, at least 4)",
            f"at most --procs-per-node {slots}, or more nodes",
        )


def _start_local(request: PlacementRequest, nodes: int) -> Cluster:
    slots = local_slots()
    check_local(request, nodes, slots)
    ray_of_ours = LocalRay()
    try:
        ray_of_ours.start(nodes, slots)
        cluster = Cluster(ray_of_ours, connected_here=True)
    except (RuntimeError, OSError, TimeoutError, ConnectionError) as error:
        ray_of_ours.stop()
        raise ResourceError(
            f"Ray could not be started on this machine: {_first_line(error)}",
            "look into /tmp/ray/session_latest/logs",
        ) from error
    except BaseException:
        ray_of_ours.stop()
        raise
    plural = "" if nodes == 1 else "s"
    gpus = sum(node.gpus for node in read_nodes())
    with_gpus = f", {gpus:g} GPU{'' if gpus == 1 else 's'}" if gpus else ""
    each = "" if nodes == 1 else " each"
    cluster.description = f"started a local Ray: {nodes} node{plural}, {slots} slots{each}{with_gpus}"
    return cluster


def _stay_connected(address: str | None) -> Cluster:
    """Use the Ray that this process is connected to already; it can be connected to one only."""
    cluster = Cluster(None, connected_here=False)
    if address not in (None, "auto", "local", cluster.address):
        _probe(str(address))
        raise ResourceError(
            f"this process is connected to the Ray cluster at {cluster.address}, not to the one at {address}",
            "leave that first: ray.shutdown()",
        )
    return cluster


def _connect(address: str) -> Cluster:
    """Join the Ray at an address that was checked before, and not wait for ever even so."""
    _probe(address)
    import ray

    # It warns that a thread cannot set the signal handler that is not wanted here.
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    failure: list[BaseException] = []

    def init() -> None:
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False, job_config=job_config())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=init, name="ray.init", daemon=True)
    with deferred_interrupt():
        thread.start()
        thread.join(INIT_TIMEOUT_S)
    if thread.is_alive():
        raise ResourceError(
            f"the Ray cluster at {address} answered, but could not be joined within {INIT_TIMEOUT_S:g} s",
            "run this on a machine that is a node of the cluster",
        )
    if failure:
        raise ResourceError(
            f"the Ray cluster at {address} could not be joined: {_first_line(failure[0])}",
            "run this on a machine that is a node of the cluster, with the same versions of Python and Ray",
        ) from failure[0]
    return Cluster(None, connected_here=True)


def _discover() -> str | None:
    """Address of the Ray that `ray start` announced on this machine, if something listens there.

    Ray's own ``auto`` also looks for any Ray among the machine's processes, and so finds the private one of another
    search or test, which ends with that.
    """
    from ray._private.services import find_bootstrap_address

    address = find_bootstrap_address(None)
    if address is None:
        return None
    host, _, port = str(address).rpartition(":")
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0),
    ):
        _use_own_token()
        return str(address)
    return None


def _use_own_token() -> None:
    """Show the user's token to a Ray that was found on this machine, as Ray does; never to an address that was given."""
    import ray._raylet as raylet

    if "RAY_AUTH_MODE" in os.environ:
        return
    if raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):  # type: ignore[attr-defined]
        os.environ["RAY_AUTH_MODE"] = "token"
        raylet.Config.initialize("")  # type: ignore[attr-defined]


def _probe(address: str) -> None:
    """Make sure that a Ray answers, within seconds; Ray itself would try for minutes and print while it does.

    Raises:
        ResourceError: Nothing listens, or what listens is not a Ray, or it wants another token.
    """
    if "://" in address:
        raise ResourceError(
            f"{address} is an address of Ray Client, which cannot place workers as needed",
            "give the address of the cluster itself, host:6379, on one of its nodes",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ResourceError(
            f"{address!r} is not an address of the form host:port", "for example 10.0.0.1:6379"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=TCP_TIMEOUT_S):
            pass
    except OSError as error:
        raise ResourceError(
            f"no Ray cluster answers at {address}: {error.strerror or error}",
            "check --address and $RAY_ADDRESS; `ray start --head` starts one",
        ) from error
    # In a process of its own: it can be ended, and what it prints is kept from the terminal.
    code = f"from ray._raylet import GcsClient; GcsClient({address!r})"
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            start_new_session=True,
        )
        output, works = result.stderr, result.returncode == 0
    except subprocess.TimeoutExpired as error:
        output, works = (error.stderr or b"").decode(errors="replace"), False
    if works:
        return
    if "Unauthenticated" in output or "AuthenticationError" in output:
        raise ResourceError(
            f"the Ray cluster at {address} wants a token that this process does not have",
            "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; or --address local for a Ray of your own",
        )
    raise ResourceError(
        f"what listens at {address} does not answer like a Ray cluster", "check --address and $RAY_ADDRESS"
    )


# ------------------------------------------------------------------------------------------------------------- room


def _wait_for_room(cluster: Cluster, request: PlacementRequest, on_wait: Callable[[str], None]) -> None:
    """Check feasibility at once, then wait a bounded time for nodes that are late or busy.

    Raises:
        ResourceError: There is still no room.
    """
    deadline = time.monotonic() + request.wait_s
    next_line = 0.0
    while True:
        nodes = read_nodes()
        cluster.shape = shape = resolve_shape(Demand(request.nodes, request.procs_per_node), nodes)
        present, free = fitting(shape, nodes, free=False), fitting(shape, nodes, free=True)
        if free >= shape.nodes:
            if not cluster.is_ours:
                cluster.description = f"joined the Ray cluster at {cluster.address}: {describe(nodes)}"
            return
        now = time.monotonic()
        # Nothing can join a Ray that we started ourselves and told nobody about.
        if now >= deadline or (cluster.is_ours and present < shape.nodes):
            raise ResourceError(cluster.supply(), _remedy(cluster, shape, present))
        if now >= next_line:
            next_line = now + LINE_EVERY_S
            on_wait(f"waiting up to {deadline - now:.0f} s for room: {cluster.supply()}")
        time.sleep(min(0.5, max(0.05, deadline - now)))


def _remedy(cluster: Cluster, shape: WorldShape, present: int) -> str:
    if present >= shape.nodes:
        return "wait until it is free (cluster.wait in model.yaml), or ask for less"
    if shape.gpu:
        return "ask for fewer nodes (--nodes) or fewer ranks on each (--procs-per-node)"
    if shape.nodes > 1 and len(read_nodes()) < shape.nodes:
        return _TWO_NODES.format(nodes=shape.nodes).replace("THIS_HOST:6379", cluster.address)
    return (
        "ask for fewer ranks (--procs-per-node, --nodes), or add nodes with `ray start --address="
        + cluster.address
        + "`"
    )


# ------------------------------------------------------------------------------------------------------ keeping quiet


def _quiet_ray() -> None:
    """Ray's settings that must stand before it is imported, and its logging, which must not reach the terminal."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray._private.worker as worker

    ray_logger = logging.getLogger("ray")
    ray_logger.handlers[:] = [logging.NullHandler()]  # Importing Ray gave it one that writes to the terminal.
    ray_logger.propagate = False

    # What raylets want to tell the driver is printed to its standard output, whatever `log_to_driver` says.
    worker.print_to_stdstream = _to_log  # type: ignore[assignment]


def _to_log(data: dict[str, Any], ignore_prefix: bool = False) -> None:
    for line in data.get("lines", []):
        logger.debug("ray: %s", line)


@contextlib.contextmanager
def _kept_sigterm() -> Iterator[None]:
    """What SIGTERM did before stays: Ray's handlers exit at any point, or abort with a stack in C++."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _is_initialized() -> bool:
    import ray

    return ray.is_initialized()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

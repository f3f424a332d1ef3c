"""What is said when there is no Ray at the address, or no room in it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerotune.cluster import WorkerGroup
from zerotune.cluster.join import Cluster, PlacementRequest, check_local, join
from zerotune.cluster.local import local_slots
from zerotune.config.errors import ExitCode, ResourceError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mute_port() -> Iterator[int]:
    """A port where something listens that is no Ray and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:{free}", "no Ray cluster answers at 127.0.0.1:"),
        ("192.0.2.77:6379", "no Ray cluster answers at 192.0.2.77:6379"),
        ("127.0.0.1:{mute}", "does not answer like a Ray cluster"),
        ("nonsense", "not an address of the form host:port"),
        ("ray://127.0.0.1:10001", "Ray Client"),
    ],
)
def test_an_unreachable_address_is_said_within_15_s(address: str, words: str, mute_port: int) -> None:
    began = time.monotonic()
    with pytest.raises(ResourceError, match=words) as caught:
        join(PlacementRequest(address=address.format(free=free_port(), mute=mute_port)))
    assert time.monotonic() - began < 15.0
    assert caught.value.exit_code is ExitCode.RESOURCES
    assert caught.value.remedy


@pytest.mark.timeout(30)
def test_the_environments_address_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(ResourceError, match="no Ray cluster answers"):
        join(PlacementRequest())


def test_two_nodes_on_one_machine_says_how_to_get_them() -> None:
    with pytest.raises(ResourceError) as caught:
        check_local(PlacementRequest(nodes=2), nodes=1, slots=4)
    text = str(caught.value)
    assert "needed: 2 nodes; present: 1" in text
    assert "ray start --head" in text and "ray start --address=" in text and "--local-nodes 2" in text


def test_more_ranks_than_slots_is_said_before_anything_starts() -> None:
    with pytest.raises(ResourceError, match="needed: 8 CPU slots on one node; present: 4; free: 4"):
        check_local(PlacementRequest(procs_per_node=8), nodes=1, slots=4)
    check_local(PlacementRequest(procs_per_node=4, nodes=2), nodes=2, slots=4)


def test_importing_the_room_is_light() -> None:
    code = (
        "import sys, zerotune.cluster, zerotune.cluster.join, zerotune.cluster.group, zerotune.cluster.supervisor;"
        "print([name for name in ('torch', 'ray', 'optuna') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.ray
@pytest.mark.timeout(60)
class TestOnOneRay:
    def test_it_says_which(self, two_nodes: Cluster, cluster: Cluster) -> None:
        assert two_nodes.description == f"started a local Ray: 2 nodes, {local_slots()} slots each"
        assert two_nodes.is_ours
        cpus = 2 * local_slots()
        assert (
            cluster.description
            == f"joined the Ray cluster at {two_nodes.address}: 2 nodes, {cpus} CPUs, 0 GPUs"
        )
        assert cluster.world_size == 2 and not cluster.is_ours

    def test_who_holds_the_place_and_room_that_comes_late(self, cluster: Cluster) -> None:
        slots = local_slots()
        lines: list[str] = []
        holder = WorkerGroup.start(cluster)
        with pytest.raises(ResourceError) as caught:
            join(PlacementRequest(nodes=2, procs_per_node=slots, wait_s=1.0), on_wait=lines.append)
        text = str(caught.value)
        assert f"needed: 2 nodes with {slots} CPUs each ({2 * slots} ranks)" in text
        assert f"present: 2 nodes, {2 * slots} CPUs, 0 GPUs" in text
        assert f"free: {2 * slots - 2} CPUs, 0 GPUs" in text
        assert f"held by zerotune {os.getpid()}@" in text
        assert lines and "waiting up to 1 s" in lines[0]

        timer = threading.Timer(1.0, holder.close)
        timer.start()
        second = join(PlacementRequest(nodes=2, procs_per_node=slots, wait_s=20.0))
        timer.join()
        assert second.world_size == 2 * slots
        second.close()
        assert cluster.supply().startswith("needed"), "closing it leaves the connection that it found"

    def test_infeasible_ends_after_the_wait(self, cluster: Cluster) -> None:
        began = time.monotonic()
        with pytest.raises(ResourceError, match="needed: 3 nodes with 2 CPUs each"):
            join(PlacementRequest(nodes=3, wait_s=0.5))
        assert time.monotonic() - began < 5.0

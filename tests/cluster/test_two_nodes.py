"""Two Ray nodes on one machine: order of the ranks, and a node that is lost."""

from __future__ import annotations

import time
from pathlib import Path

import cluster_jobs
import pytest

from zerotune.cluster import GroupFailed, WorkerGroup
from zerotune.cluster.join import Cluster
from zerotune.cluster.local import local_slots
from zerotune.records import Status

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_consecutive_ranks_per_node(two_nodes: Cluster, tmp_path: Path) -> None:
    assert two_nodes.description == f"started a local Ray: 2 nodes, {local_slots()} slots each"
    with WorkerGroup.start(two_nodes) as group:
        results = group.run(cluster_jobs.facts, None, run_dir=str(tmp_path))
        assert [(p.rank, p.node_rank, p.local_rank) for p in group.places] == [
            (0, 0, 0),
            (1, 0, 1),
            (2, 1, 0),
            (3, 1, 1),
        ]
        assert group.places[0].node_id == group.places[1].node_id == two_nodes.driver_node
        assert group.places[2].node_id == group.places[3].node_id != two_nodes.driver_node
        assert [result["rank"] for result in results] == [0, 1, 2, 3]
        assert [result["local_rank"] for result in results] == [0, 1, 0, 1]
        assert {result["sum"] for result in results} == {4.0}
        assert {result["threads"] for result in results} == {1}


def test_a_lost_node_is_named(two_nodes: Cluster, tmp_path: Path) -> None:
    """The last test on this Ray, which it leaves with one node."""
    two_nodes.shape.procs_per_node = 1
    with WorkerGroup.start(two_nodes) as group:
        victim = two_nodes._local._extra_nodes[0]  # type: ignore[union-attr]
        killed: list[float] = []

        def kill(rank: int, progress: object) -> None:
            if not killed:
                killed.append(time.monotonic())
                victim.kill_raylet()

        with pytest.raises(GroupFailed) as caught:
            group.run(cluster_jobs.wait_or_reduce, None, run_dir=str(tmp_path), on_progress=kill)
        assert time.monotonic() - killed[0] < 20.0
        failure = caught.value.failure
        assert (failure.status, failure.rank) == (Status.LOST_NODE, 1), failure

from __future__ import annotations

import random

import pytest

from zerotune.cluster.messages import SupervisorFacts, WorldShape
from zerotune.cluster.placement import default_threads, order_places
from zerotune.cluster.supply import Demand, NodeSupply, describe, fitting, needed, resolve_shape
from zerotune.config.errors import ResourceError


def facts(node: str, ip: str, devices: tuple[int, ...] = (), pid: int = 1) -> SupervisorFacts:
    return SupervisorFacts(
        node_id=node, node_name=f"host-{node}", ip=ip, pid=pid, device_ids=devices, cores=8
    )


def test_ranks_are_consecutive_on_nodes_and_devices_in_numeric_order() -> None:
    supervisors = [
        facts(node, ip, (gpu,)) for node, ip in (("b", "10.0.0.9"), ("a", "10.0.0.10")) for gpu in (2, 10, 0)
    ]
    for seed in range(20):
        random.Random(seed).shuffle(supervisors)
        places = order_places(supervisors, driver_node=None)
        assert [(p.rank, p.node_id, p.device_ids, p.local_rank, p.node_rank) for p in places] == [
            (0, "a", (0,), 0, 0),
            (1, "a", (2,), 1, 0),
            (2, "a", (10,), 2, 0),
            (3, "b", (0,), 0, 1),
            (4, "b", (2,), 1, 1),
            (5, "b", (10,), 2, 1),
        ]
        assert all(supervisors[p.slot].device_ids == p.device_ids for p in places)


def test_rank_0_is_on_the_drivers_node() -> None:
    places = order_places(
        [facts("a", "10.0.0.1"), facts("c", "10.0.0.3"), facts("b", "10.0.0.2")], driver_node="b"
    )
    assert [place.node_id for place in places] == ["b", "a", "c"]
    assert [place.node_rank for place in places] == [0, 1, 2]


def test_two_nodes_of_one_machine_are_two_nodes() -> None:
    supervisors = [
        facts(node, "127.0.0.1", pid=pid) for node, pid in (("x", 7), ("y", 5), ("x", 6), ("y", 8))
    ]
    places = order_places(supervisors, driver_node="y")
    assert [(p.node_id, p.local_rank, p.node_rank) for p in places] == [
        ("y", 0, 0),
        ("y", 1, 0),
        ("x", 0, 1),
        ("x", 1, 1),
    ]
    assert [supervisors[p.slot].pid for p in places] == [5, 8, 6, 7]


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(2, 2, 1), (2, 4, 1), (2, 8, 4), (1, 2, 1), (1, 4, 4), (8, 4, 1)]
)
def test_default_threads(ranks: int, cores: int, threads: int) -> None:
    assert default_threads(ranks, cores) == threads


def node(name: str, cpus: float, gpus: float = 0.0, free: float | None = None) -> NodeSupply:
    return NodeSupply(name, name, "10.0.0.1", cpus, gpus, cpus if free is None else free, gpus)


def test_the_whole_cluster_by_default() -> None:
    assert resolve_shape(Demand(None, None), [node("a", 8), node("b", 8)]) == WorldShape(2, 2, False)
    # A head that runs nothing does not count; GPUs decide where there are any.
    assert resolve_shape(Demand(None, None), [node("head", 0), node("b", 8)]) == WorldShape(1, 2, False)
    gpus = [node("head", 8), node("b", 64, 8), node("c", 64, 8)]
    assert resolve_shape(Demand(None, None), gpus) == WorldShape(2, 8, True)
    assert resolve_shape(Demand(1, 4), gpus) == WorldShape(1, 4, True)


def test_nodes_that_disagree_about_gpus_are_refused() -> None:
    nodes = [node("a", 64, 8), node("b", 64, 4)]
    with pytest.raises(ResourceError, match=r"different numbers of GPUs \(a: 8, b: 4\)"):
        resolve_shape(Demand(None, None), nodes)
    assert resolve_shape(Demand(None, 4), nodes) == WorldShape(2, 4, True)


def test_two_nodes_of_one_cpu_cannot_serve_one_bundle_of_two() -> None:
    shape = WorldShape(1, 2)
    nodes = [node("a", 1), node("b", 1)]
    assert fitting(shape, nodes, free=False) == 0
    assert needed(shape) == "1 node with 2 CPUs (2 ranks)"
    assert describe(nodes) == "2 nodes, 2 CPUs, 0 GPUs"
    assert describe(nodes, free=True) == "2 CPUs, 0 GPUs (CPUs by node: 1, 1)"


def test_busy_is_not_absent() -> None:
    nodes = [node("a", 4, free=1)]
    assert fitting(WorldShape(1, 2), nodes, free=False) == 1
    assert fitting(WorldShape(1, 2), nodes, free=True) == 0

"""What a cluster has, and whether that is enough: pure, but for the two functions that ask Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotune.cluster.messages import WorldShape
from zerotune.config.errors import ResourceError

DEFAULT_PROCS_WITHOUT_GPUS = 2


@dataclass(frozen=True)
class NodeSupply:
    """What one living node has and has free."""

    node_id: str
    name: str
    ip: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


@dataclass(frozen=True)
class Demand:
    """What was asked for; ``None`` leaves it to the cluster."""

    nodes: int | None
    procs_per_node: int | None


def _amount(number: float, what: str) -> str:
    return f"{number:g} {what}" + ("" if number == 1 else "s")


def describe(nodes: Sequence[NodeSupply], *, free: bool = False) -> str:
    """``2 nodes, 16 CPUs, 0 GPUs``; node by node where they are few and differ."""
    cpus = [node.free_cpus if free else node.cpus for node in nodes]
    gpus = [node.free_gpus if free else node.gpus for node in nodes]
    total = f"{_amount(sum(cpus), 'CPU')}, {_amount(sum(gpus), 'GPU')}"
    if free:
        if len(nodes) < 2:
            return total
        each = ", ".join(f"{cpu:g}" for cpu in cpus[:8]) + (", …" if len(cpus) > 8 else "")
        return f"{total} (CPUs by node: {each})"
    return f"{_amount(len(nodes), 'node')}, {total}"


def resolve_shape(demand: Demand, nodes: Sequence[NodeSupply]) -> WorldShape:
    """Turn the demand into numbers for this cluster; whether it fits is :func:`shortage`.

    Nodes that offer nothing to run on (a head without CPUs; in a cluster with GPUs, nodes without any) do not count.

    Raises:
        ResourceError: The nodes differ in their number of GPUs, and nobody said how many to use.
    """
    with_gpus = [node for node in nodes if node.gpus >= 1]
    gpu = bool(with_gpus)
    usable = with_gpus if gpu else [node for node in nodes if node.cpus >= 1]
    procs = demand.procs_per_node
    if procs is None:
        if gpu:
            counts = {int(node.gpus) for node in with_gpus}
            if len(counts) > 1:
                listed = ", ".join(f"{node.name}: {int(node.gpus)}" for node in with_gpus)
                raise ResourceError(
                    f"the nodes have different numbers of GPUs ({listed})",
                    "say how many to use: --procs-per-node",
                )
            procs = counts.pop()
        else:
            procs = DEFAULT_PROCS_WITHOUT_GPUS
    return WorldShape(nodes=demand.nodes or max(1, len(usable)), procs_per_node=procs, gpu=gpu)


def needed(shape: WorldShape) -> str:
    """``2 nodes with 4 CPUs each (8 ranks)``."""
    device = _amount(shape.procs_per_node, "GPU" if shape.gpu else "CPU")
    each = " each" if shape.nodes > 1 else ""
    return f"{_amount(shape.nodes, 'node')} with {device}{each} ({_amount(shape.world_size, 'rank')})"


def fitting(shape: WorldShape, nodes: Sequence[NodeSupply], *, free: bool) -> int:
    """How many nodes could take their share, at all or right now."""

    def fits(node: NodeSupply) -> bool:
        cpus, gpus = (node.free_cpus, node.free_gpus) if free else (node.cpus, node.gpus)
        return cpus >= shape.procs_per_node and (not shape.gpu or gpus >= shape.procs_per_node)

    return sum(fits(node) for node in nodes)


def read_nodes() -> list[NodeSupply]:
    """The living nodes, as Ray sees them now."""
    import ray

    free = ray._private.state.available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        has, left = node["Resources"], free.get(node["NodeID"], {})
        nodes.append(
            NodeSupply(
                node_id=node["NodeID"],
                name=node["NodeManagerHostname"],
                ip=node["NodeManagerAddress"],
                cpus=has.get("CPU", 0.0),
                gpus=has.get("GPU", 0.0),
                free_cpus=left.get("CPU", 0.0),
                free_gpus=left.get("GPU", 0.0),
            )
        )
    return nodes


def holders() -> list[str]:
    """Who holds resources, as far as Ray says: named placement groups and other drivers."""
    import ray

    found = []
    try:
        for group in ray.util.placement_group_table().values():
            if group["state"] == "CREATED":
                found.append(group["name"] or f"placement group {group['placement_group_id'][:8]}")
        mine = ray.get_runtime_context().get_job_id()
        for job in ray._private.state.jobs():
            if not job["IsDead"] and job["JobID"] != mine:
                found.append(f"driver {job['DriverPid']}@{job['DriverIPAddress']} ({job['Entrypoint'][:60]})")
    except Exception:
        return found  # It only explains; what is needed, present and free is said anyway.
    return found

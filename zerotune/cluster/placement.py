"""Who goes where: one placement group with one bundle per node, and the order of the ranks."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from zerotune.cluster.messages import RankPlace, SupervisorFacts, WorldShape


def order_places(supervisors: Sequence[SupervisorFacts], driver_node: str | None) -> list[RankPlace]:
    """Ranks for supervisors: consecutive on each node, the driver's node first, devices in numeric order.

    Nodes are told apart by Ray's id: two nodes of one machine have one address. The order is the same for the same
    supervisors in any order, but for the pid, which tells CPU ranks of one node apart.

    Args:
        supervisors: What each supervisor says of itself, in the order they were created.
        driver_node: Ray's id of the node that the driver runs on.

    Returns:
        One place per supervisor, by rank; ``slot`` points back into ``supervisors``.
    """

    def key(slot: int) -> tuple[Any, ...]:
        facts = supervisors[slot]
        return (facts.node_id != driver_node, facts.node_id, facts.device_ids, facts.pid)

    node_ranks: dict[str, int] = {}
    local: dict[str, int] = {}
    places = []
    for rank, slot in enumerate(sorted(range(len(supervisors)), key=key)):
        facts = supervisors[slot]
        node_rank = node_ranks.setdefault(facts.node_id, len(node_ranks))
        local_rank = local.get(facts.node_id, 0)
        local[facts.node_id] = local_rank + 1
        places.append(
            RankPlace(
                rank=rank,
                local_rank=local_rank,
                node_rank=node_rank,
                node_id=facts.node_id,
                node_name=facts.node_name,
                ip=facts.ip,
                device_ids=facts.device_ids,
                slot=slot,
            )
        )
    return places


def default_threads(ranks_on_host: int, cores: int) -> int:
    """Threads of each rank: an equal share of the cores, and 1 where ranks take half of them or more."""
    return 1 if ranks_on_host * 2 >= cores else max(1, cores // ranks_on_host)


def group_name() -> str:
    """The placement group's name, which says who holds it to whoever waits."""
    return f"zerotune {os.getpid()}@{socket.gethostname()} {secrets.token_hex(2)}"


def create_placement_group(shape: WorldShape) -> Any:
    """Ask Ray for one bundle per node; the caller waits for it."""
    from ray.util.placement_group import placement_group

    bundle = {"CPU": float(shape.procs_per_node)}
    if shape.gpu:
        bundle["GPU"] = float(shape.procs_per_node)
    return placement_group(
        [bundle] * shape.nodes,
        strategy="STRICT_SPREAD" if shape.nodes > 1 else "STRICT_PACK",
        name=group_name(),
    )

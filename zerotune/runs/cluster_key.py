"""What makes two clusters the same for a measurement."""

from __future__ import annotations

from zerotune.records import Fingerprint


def cluster_fingerprint(device: str, ranks_per_node: int, nodes: int, link: str | None) -> Fingerprint:
    """The key of a cluster: only what is declared or fixed, never a rate that was measured.

    Args:
        device: Name of the GPU model, or of the CPU model where ranks run on CPUs.
        ranks_per_node: Ranks on each node.
        nodes: Number of nodes.
        link: Kind of link between nodes that the user declared, if any.
    """
    return Fingerprint.of(
        {"device": device, "ranks_per_node": ranks_per_node, "nodes": nodes, "link": link or "undeclared"}
    )

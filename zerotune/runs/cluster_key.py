"""What makes two clusters the same for a measurement."""

from __future__ import annotations

import platform
from pathlib import Path

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


def device_model(gpu: bool) -> str:
    """Name of the device that ranks run on: the GPU model as the joined Ray knows it, or the CPU model."""
    return _gpu_model() if gpu else _cpu_model()


def _gpu_model() -> str:
    import ray

    prefix = "accelerator_type:"
    resources = {name for node in ray.nodes() if node["Alive"] for name in node["Resources"]}
    return (
        " + ".join(sorted(name.removeprefix(prefix) for name in resources if name.startswith(prefix)))
        or "gpu"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "cpu"

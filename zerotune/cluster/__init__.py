"""Ray: joining a cluster, placing ranks, and running any callable on them. Knows nothing of what is run.

The names are loaded on first use; importing this package loads neither torch nor ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotune.cluster.faults import GroupFailed
    from zerotune.cluster.group import WorkerGroup
    from zerotune.cluster.join import Cluster, PlacementRequest
    from zerotune.cluster.messages import Limits, RankPlace, WorldShape

__all__ = ["Cluster", "GroupFailed", "Limits", "PlacementRequest", "RankPlace", "WorkerGroup", "WorldShape"]

_HOMES = {
    "Cluster": "join",
    "GroupFailed": "faults",
    "Limits": "messages",
    "PlacementRequest": "join",
    "RankPlace": "messages",
    "WorkerGroup": "group",
    "WorldShape": "messages",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

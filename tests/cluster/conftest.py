from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _no_outer_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own Ray settings are not these tests' business."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[object]:
    """One local Ray of two nodes for all tests: starting one takes seconds of every core."""
    from zerotune.cluster.join import PlacementRequest, join

    os.environ.pop("RAY_ADDRESS", None)
    with join(PlacementRequest(local_nodes=2, nodes=2, procs_per_node=2)) as ours:
        yield ours


@pytest.fixture(scope="module")
def cluster(two_nodes: object) -> Iterator[object]:
    """Room for two ranks on one node of it."""
    from zerotune.cluster.join import PlacementRequest, join

    with join(PlacementRequest(nodes=1, procs_per_node=2)) as joined:
        yield joined

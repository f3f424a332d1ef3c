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


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """One local Ray per module, shared by its tests."""
    from zerotune.cluster.join import PlacementRequest, join

    os.environ.pop("RAY_ADDRESS", None)
    with join(PlacementRequest(procs_per_node=2, address="local")) as joined:
        yield joined

"""Random joint settings of all stage-3 knobs, drawn once from a fixed seed."""

from __future__ import annotations

import random
from typing import Any

from zerotune.config.knobs import REGISTRY


def random_settings(count: int, seed: int = 10) -> list[dict[str, Any]]:
    """Settings with persistence 0, in each of which every stage-3 knob of the registry is set.

    Sizes are drawn around the size of a block of the test models (some 5000 elements).
    """
    rng = random.Random(seed)

    def size(smallest: int = 0) -> int:
        return max(smallest, int(5000 * rng.choice([0, 0.1, 0.5, 1, 2, 4])))

    settings = []
    for number in range(count):
        release = ["after_use", "reuse", "keep"][number % 3]
        knobs = {
            "stage": 3,
            "unit_size": rng.choice(["block", size(50), size(1500)]),
            "allgather_bucket_size": size(),
            "prefetch_distance": size(),
            "backward_prefetch_distance": rng.choice(["auto", size()]),
            "param_persistence_threshold": 0,
            "release": release,
            "max_reuse_distance": size(1) if release == "reuse" else None,
            "memory_budget": None,
            "max_live_parameters": rng.choice([None, size(), 4 * size(1000)]),
            "reduce_bucket_size": size(),
            "overlap_comm": rng.random() < 0.7,
        }
        zero_knobs = {name for name, info in REGISTRY.items() if info.section == "zero"}
        assert set(knobs) == zero_knobs, "a knob is missing from the random settings"
        settings.append(knobs)
    return settings

"""The states of the random generators of a rank, as tensors."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

from zerotune.engine import RankGroup


def random_states(group: RankGroup) -> dict[str, torch.Tensor]:
    """Torch's, Python's and numpy's, under keys with this rank's number."""
    rank = group.rank
    _, numbers, position, has_gauss, gauss = cast(tuple[Any, ...], np.random.get_state())
    version, words, next_gauss = random.getstate()
    states = {
        f"rng/cpu/{rank}": torch.get_rng_state(),
        f"rng/numpy/{rank}": torch.tensor([*numbers.tolist(), position, has_gauss, _bits(gauss)]),
        f"rng/python/{rank}": torch.tensor(
            [version, *words, next_gauss is not None, _bits(next_gauss or 0.0)], dtype=torch.int64
        ),
    }
    if group.device.type == "cuda":
        states[f"rng/cuda/{rank}"] = torch.cuda.get_rng_state(group.device)
    return states


def set_random_states(group: RankGroup, states: dict[str, torch.Tensor]) -> None:
    """Go on from what :func:`random_states` gave; generators without a saved state stay as they are."""
    rank = group.rank
    if (state := states.get(f"rng/cpu/{rank}")) is not None:
        torch.set_rng_state(state)
    if (state := states.get(f"rng/cuda/{rank}")) is not None:
        torch.cuda.set_rng_state(state, group.device)
    if (state := states.get(f"rng/numpy/{rank}")) is not None:
        *numbers, position, has_gauss, gauss = state.tolist()
        np.random.set_state(
            ("MT19937", np.array(numbers, dtype=np.uint32), position, has_gauss, _number(gauss))
        )
    if (state := states.get(f"rng/python/{rank}")) is not None:
        version, *words, has_next, next_gauss = state.tolist()
        random.setstate((version, tuple(words), _number(next_gauss) if has_next else None))


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _number(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))

"""What ranks tell one another at the end of a step, in one small exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerotune.config.errors import RunFailed
from zerotune.engine import RankGroup
from zerotune.zero.shards import ShardedParam


class Told(NamedTuple):
    """What one rank tells.

    Attributes:
        loss: Sum of its losses, each times its weight.
        weight: Sum of the weights.
        norm: Its part of the gradient's norm.
        untouched: Trainable parameters that had no gradient.
        trouble: Which trainable parameter's gradient was the first that is not finite; -1 for none.
        digest: Stands for the order in which it ran its modules.
    """

    loss: float
    weight: float
    norm: float
    untouched: float
    trouble: float
    digest: float


def tell(
    group: RankGroup,
    loss: torch.Tensor,
    weight: float,
    norm: torch.Tensor,
    trainable: Sequence[ShardedParam],
    trouble: ShardedParam | None,
    digests: Sequence[str],
) -> list[Told]:
    """Exchange all of it; the host waits for the device here, once a step.

    Args:
        group: The ranks.
        loss: Sum of weighted losses  # scalar
        weight: Sum of weights.
        norm: Part of the norm  # scalar
        trainable: Parameters that get gradients.
        trouble: The first of them whose gradient was not finite, if it was looked for.
        digests: Of the passes since the last step.

    Returns:
        What each rank told, by rank.
    """
    untouched = sum(not param.is_touched for param in trainable)
    index = next((i for i, param in enumerate(trainable) if param is trouble), -1)
    rows = group.gather_numbers(
        [loss, weight, norm, float(untouched), float(index), float(_combined(digests))]
    )
    return [Told(*row) for row in rows]


def check_order(told: Sequence[Told], step: int) -> None:
    """Refuse to go on where ranks ran different orders.

    Raises:
        RunFailed: Names the first rank that differs from rank 0.
    """
    different = [rank for rank, each in enumerate(told) if each.digest != told[0].digest]
    if different:
        raise RunFailed(
            f"rank {different[0]} ran its modules in another order than rank 0 in step {step}",
            "ranks must use the same modules in the same order",
        )


def _combined(digests: Sequence[str]) -> int:
    """One number for all of them, that float64 holds exactly."""
    combined = 0
    for digest in digests:
        combined = (combined * 1_000_003 + int(digest[:12], 16)) % (1 << 48)
    return combined

"""The norm of the gradient over all ranks, and what clipping multiplies it by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from zerotune.config.errors import UsageError
from zerotune.zero.shards import ShardedParam

NormType = Literal["2", "inf"]


def norm_type_of(value: float | str) -> NormType:
    """2 or infinity, as a number or a word.

    Raises:
        UsageError: It is another norm.
    """
    if value in (2, "2"):
        return "2"
    if value in (math.inf, "inf"):
        return "inf"
    raise UsageError(f"clip_norm_type {value!r} is not known", "use 2 or inf")


def norm_part(
    params: Iterable[ShardedParam],
    ranks: int,
    rank: int,
    replicated: bool,
    norm_type: NormType,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """This rank's part of the norm: the sum of squares of its slices of the gradients, or their largest magnitude.

    Padding is zero and adds nothing. Slices are taken in a fixed order, and at stage 0, where every rank holds all of
    them, only the rank's own count: the parts are the same to the bit at every stage.

    Returns:
        float64, on the device, so that the host need not wait  # scalar
    """
    slices = []
    for param in params:
        if param.grad is not None and param.has_grad and param.slice:
            slices.append(param.grad.view(ranks, param.slice)[rank] if replicated else param.grad)
    if not slices:
        return torch.zeros((), dtype=torch.float64, device=device)
    if norm_type == "inf":
        return torch.stack(torch._foreach_norm(slices, math.inf, dtype=dtype)).max().to(torch.float64)
    norms = torch.stack(torch._foreach_norm(slices, 2, dtype=dtype)).to(torch.float64)
    return (norms * norms).sum()


def whole_norm(parts: Sequence[float], norm_type: NormType) -> float:
    """The norm from every rank's part; not finite if one of them is not."""
    if norm_type == "2":
        return math.sqrt(sum(parts))
    return max(parts) if all(map(math.isfinite, parts)) else math.nan


def clip_factor(norm: float, largest: float | None) -> float:
    """What the gradient is multiplied by so that its norm is at most ``largest``; 1 for ``None`` and infinity.

    As in torch's ``clip_grad_norm_``, 1e-6 is added to the norm.
    """
    return 1.0 if largest is None else min(1.0, largest / (norm + 1e-6))

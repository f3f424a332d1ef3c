"""Cross-entropy of a large vocabulary, without copies of the logits that nobody needs.

For R positions and V words torch's own keeps the logarithms of the probabilities until backward, and has two more
tensors of that size alive in the middle of backward, all fp32. Here backward has the logits, in the dtype in which they
came, and the gradient that it is making, nothing else of that size; what is fp32 is a few rows at a time. That moment is
the one at which a training step takes the most memory. Logits of double precision are worked on in theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CPU_BYTES = 2**20
_DEVICE_BYTES = 2**26
"""fp32 bytes of the rows that are worked on at a time: within a CPU's cache; on a GPU enough to fill it."""


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, targets_R: Tensor, ignored: int) -> Tensor:
        counts_R = targets_R != ignored
        targets_R1 = targets_R.where(counts_R, 0)[:, None]
        dtype = _sum_dtype(logits_RV)
        losses_R = torch.empty(len(logits_RV), dtype=dtype, device=logits_RV.device)
        for rows in _chunks(logits_RV):
            logs = torch.log_softmax(logits_RV[rows], 1, dtype=dtype)
            torch.neg(logs.gather(1, targets_R1[rows])[:, 0], out=losses_R[rows])
        ctx.save_for_backward(logits_RV, targets_R1, counts_R)
        return losses_R.where(counts_R, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of a row is its probabilities, less one for the target."""
        logits_RV, targets_R1, counts_R = ctx.saved_tensors
        grads_RV = torch.empty_like(logits_RV)
        dtype = _sum_dtype(logits_RV)
        weights_R1 = (counts_R * grad)[:, None]
        for rows in _chunks(logits_RV):
            target = grads_RV[rows]
            found = target if target.dtype is dtype else target.new_empty(target.shape, dtype=dtype)
            torch.softmax(logits_RV[rows], 1, dtype=dtype, out=found)
            found.scatter_add_(1, targets_R1[rows], found.new_full((1, 1), -1.0).expand(len(found), 1))
            found.mul_(weights_R1[rows])
            if found is not target:
                target.copy_(found)
        return grads_RV, None, None


def _sum_dtype(logits_RV: Tensor) -> torch.dtype:
    return torch.promote_types(logits_RV.dtype, torch.float32)


def _chunks(logits_RV: Tensor) -> list[slice]:
    rows, words = logits_RV.shape
    at_a_time = _CPU_BYTES if logits_RV.device.type == "cpu" else _DEVICE_BYTES
    step = max(at_a_time // (4 * max(words, 1)), 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def cross_entropy_sum(logits_RV: Tensor, targets_R: Tensor, ignored: int) -> Tensor:
    """Sum of the cross-entropies of all rows whose target counts, in fp32; in fp64 of fp64 logits.

    Args:
        logits_RV: Of any floating dtype  # [R, V]
        targets_R: Indices of words  # [R]
        ignored: The target of rows that do not count.

    Returns:
        fp32 or fp64; the gradient is no function to be differentiated again  # scalar
    """
    loss: Tensor = _CrossEntropySum.apply(logits_RV, targets_R, ignored)
    return loss

"""What every engine implements, so that a launch, a search or a benchmark runs any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from zerotune.records import ByteClass, Ledger


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports; every rank holds the same values.

    Attributes:
        loss: Weighted mean of the losses given to :meth:`Engine.backward` since the last step, over all ranks.
        weight: Sum of their weights over all ranks (with token counts as weights, the step's real tokens).
        grad_norm: Global norm of the mean gradient before clipping: the 2-norm, or whichever clipping is set to.
        skipped: Whether the parameters were left alone, because the gradient was not finite on some rank.
        loss_scale: What losses were multiplied by before backward, under fp16.
    """

    loss: float
    weight: float
    grad_norm: float
    skipped: bool = False
    loss_scale: float = 1.0


class Engine(Protocol):
    """A model with its optimizer on the ranks of one group.

    One optimizer step is any number of ``backward(loss(engine(x)))`` followed by one ``step()``.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        """Add the gradients of a micro-batch.

        Args:
            loss: Scalar mean over the micro-batch's items.
            weight: Number of items it is the mean of (tokens, say). The step's gradient is that of
                ``sum(weight * loss) / sum(weight)`` over all ranks and micro-batches, however items fall.
        """

    def step(self) -> StepResult:
        """Reduce, clip, update the parameters and begin the next accumulation window."""

    def flush(self) -> None:
        """Drop everything that is only held to be fast: after it nothing is live, and pools are empty."""

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Full parameters and buffers on the CPU, as the plain module's ``state_dict()``; collective."""

    def at_rest(self) -> dict[ByteClass, int]:
        """Bytes by class that this rank holds between steps."""

    def begin_ledger(self) -> None:
        """Record the ledger from here on."""

    def end_ledger(self) -> Ledger:
        """Stop recording; return what was recorded since :meth:`begin_ledger`."""

    def close(self) -> None:
        """Undo what was done to the module and drop all storage."""

"""What all peers have in common: a window of micro-batches of equal weight, a step, and what it costs to hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from zerotune.config.errors import UsageError
from zerotune.engine.group import RankGroup
from zerotune.engine.protocol import StepResult
from zerotune.records import ByteClass, Ledger

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class PeerSetup:
    """How a peer is to train.

    Attributes:
        optimizer: Builds the optimizer from parameter groups: the same fused one for every engine.
        accumulation: Micro-batches per step; peers synchronise with the last.
        micro_batch_size: Samples of one of them.
        clip_norm: Largest global norm of the gradient; ``None`` for no clipping.
    """

    optimizer: OptimizerFactory
    accumulation: int = 1
    micro_batch_size: int = 1
    clip_norm: float | None = None


class Peer:
    """A model trained by another library, on the ranks of a group.

    Peers average over ranks and micro-batches, whatever these weigh, so all micro-batches of a window must weigh the
    same: a comparison with padded batches would compare two different trainings.

    Args:
        module: The model, taken over.
        setup: How it is trained.
        group: The ranks.
    """

    name: ClassVar[str]
    peak_live_elements: ClassVar[int] = 0  # what is full when is the library's own affair
    elements_per_step: ClassVar[float]
    """Elements that one rank sends in a step, by the library's documentation, in shares of P (N-1)/N."""

    def __init__(self, module: nn.Module, setup: PeerSetup, group: RankGroup) -> None:
        self.module = module
        self.setup = setup
        self.group = group
        self.optimizer = self._build()
        self._losses: list[float] = []
        self._weights: list[float] = []
        self.steps = 0

    # ------------------------------------------------------------------------------------------ what a peer defines

    def _build(self) -> torch.optim.Optimizer:
        """Wrap the model; returns the optimizer."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        """Gradients of one micro-batch's mean loss; averaged over ranks when it is the window's last."""
        (loss / self.setup.accumulation if self.setup.accumulation > 1 else loss).backward()

    def _step(self) -> None:
        """Clip, update, drop the gradients."""
        if self.setup.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.setup.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Full parameters and buffers on the CPU, as the plain module's ``state_dict()``; collective."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop what the library holds."""
        self.optimizer.state.clear()

    # ------------------------------------------------------------------------------------------------- the protocol

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch under way is the window's last."""
        return len(self._losses) == self.setup.accumulation - 1

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        """Add the gradients of a micro-batch; see :meth:`zerotune.engine.Engine.backward`.

        Raises:
            UsageError: It weighs another number of items than the window's first.
        """
        if self._weights and weight != self._weights[0]:
            raise UsageError(
                f"{self.name} averages micro-batches as if they weighed the same, these weigh {self._weights[0]:g} "
                f"and {weight:g} items",
                "compare on data without padding",
            )
        self._backward(loss)
        self._losses.append(float(loss.detach()))
        self._weights.append(weight)

    def step(self) -> StepResult:
        """Update the parameters and begin the next window; the loss is this rank's own."""
        self._step()
        result = StepResult(sum(self._losses) / len(self._losses), sum(self._weights), float("nan"))
        self._losses.clear()
        self._weights.clear()
        self.steps += 1
        return result

    def flush(self) -> None:
        """Peers hold nothing that could be dropped."""

    def at_rest(self) -> dict[ByteClass, int]:
        """Bytes of the unique storages of parameters and buffers, gradients, and optimizer state on this rank."""
        params = [*self.module.parameters(), *self.module.buffers()]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            ByteClass.SHARD: bytes_of(params),
            ByteClass.GRADIENT: bytes_of(p.grad for p in self.module.parameters() if p.grad is not None),
            ByteClass.OPTIMIZER: bytes_of(v for v in states if isinstance(v, torch.Tensor)),
        }

    def begin_ledger(self) -> None:
        """Peers keep none."""

    def end_ledger(self) -> Ledger:
        """What is at rest, and nothing else."""
        held = self.at_rest()
        return Ledger(
            rank=self.group.rank, collectives=[], samples=[], at_rest=held, peak=held, peak_live_elements=0
        )


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the unique local storages of tensors; of a DTensor those of its local part."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())

"""PyTorch's DistributedDataParallel: every rank holds everything, gradients are all-reduced in buckets."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from zerotune.peers.base import Peer, bytes_of
from zerotune.records import ByteClass


class Ddp(Peer):
    """DDP with ``gradient_as_bucket_view``, as its tuning guide recommends, and ``no_sync`` while it accumulates."""

    name: ClassVar[str] = "ddp"
    elements_per_step: ClassVar[float] = 2.0

    def _build(self) -> torch.optim.Optimizer:
        device = self.group.device
        self._ddp = DistributedDataParallel(
            self.module,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=self.group.process_group,
            gradient_as_bucket_view=True,
        )
        return self.setup.optimizer([{"params": [p for p in self.module.parameters() if p.requires_grad]}])

    def _synchronised(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_last else self._ddp.no_sync()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._synchronised():
            return self._ddp(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        with self._synchronised():
            super()._backward(loss)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.module.state_dict().items()}

    def at_rest(self) -> dict[ByteClass, int]:
        """Its buckets stay when gradients, which are views of them, are dropped."""
        held = super().at_rest()
        if not held[ByteClass.GRADIENT]:
            held[ByteClass.GRADIENT] = bytes_of(p for p in self.module.parameters() if p.requires_grad)
        return held

    def close(self) -> None:
        super().close()
        del self._ddp

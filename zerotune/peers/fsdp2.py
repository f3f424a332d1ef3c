"""PyTorch's FSDP2, ``fully_shard`` on every block and on the root."""

from __future__ import annotations

import itertools
from typing import ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from zerotune.models.units import repeated_blocks
from zerotune.peers.base import Peer


class Fsdp2(Peer):
    """FSDP2 with its defaults: blocks are resharded after forward, the root is not."""

    name: ClassVar[str] = "fsdp2"
    elements_per_step: ClassVar[float] = 3.0
    reshards: ClassVar[bool | None] = None
    prefetches: ClassVar[bool] = False

    def _build(self) -> torch.optim.Optimizer:
        group = self.group
        assert group.process_group is not None, "FSDP2 needs a process group"
        mesh = DeviceMesh.from_group(group.process_group, group.device.type)
        blocks = repeated_blocks(self.module)
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshards)
        fully_shard(self.module, mesh=mesh, reshard_after_forward=self.reshards)
        if self.prefetches:
            self._prefetch(blocks)
        return self.setup.optimizer([{"params": [p for p in self.module.parameters() if p.requires_grad]}])

    def _prefetch(self, blocks: list[torch.nn.Module]) -> None:
        """Gather the next block while one computes: on CPU FSDP2 does not do so by itself."""
        for block, following in itertools.pairwise(blocks):
            block.register_forward_pre_hook(lambda *_, following=following: _gather(following), prepend=True)

    def _backward(self, loss: torch.Tensor) -> None:
        if self.setup.accumulation > 1:
            assert isinstance(self.module, FSDPModule)
            self.module.set_requires_gradient_sync(self.is_last)
        super()._backward(loss)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()
            for name, value in self.module.state_dict().items()
        }


class Fsdp2Keep(Fsdp2):
    """FSDP2 that keeps parameters from forward to backward (``reshard_after_forward=False``)."""

    name: ClassVar[str] = "fsdp2:keep"
    elements_per_step: ClassVar[float] = 2.0
    reshards = False


class Fsdp2Async(Fsdp2):
    """FSDP2 that gathers the next block beside compute (``unshard(async_op=True)``)."""

    name: ClassVar[str] = "fsdp2:async"
    prefetches = True


def _gather(block: torch.nn.Module) -> None:
    assert isinstance(block, FSDPModule)
    block.unshard(async_op=True)

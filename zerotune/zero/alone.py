"""What a rank that is alone does with its gradients: they are the sums, and stay where autograd put them if they can."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerotune.engine import LedgerKeeper
from zerotune.records import ByteClass
from zerotune.schedule import Bucket, ParamRef
from zerotune.zero.collector import Collector, add_into
from zerotune.zero.shards import ShardStore

_REMEMBERED = 4096
"""Groups of parameters that are remembered."""


class _Group:
    """Parameters that are collected together.

    Args:
        refs: Which.
        shards: Where they are.
    """

    def __init__(self, refs: Sequence[ParamRef], shards: ShardStore) -> None:
        self.refs = refs
        self.params = [shards[ref] for ref in refs]
        self.owners = [param.param for param in self.params]
        self.units = list(dict.fromkeys(ref.unit for ref in refs))
        self.found_among = shards.trainable
        """What trained when the next was found."""
        whole = [param for unit in self.units for param in shards.units[unit].trainable]
        self.can_stay = len(whole) == len(self.params) and all(
            mine is its and mine.numel == mine.slice for mine, its in zip(self.params, whole, strict=True)
        )
        """Whether they are all that trains of their units, in order, and nothing is padded."""


class LoneCollector(Collector):
    """Gradients of a rank that is alone become the shards' gradients, or are added to them, as soon as they are collected.

    Args:
        shards: The parameters.
        ledger: Counts bytes.
        dtype: Dtype that would travel; what is wider is rounded to it, as on many ranks.
    """

    def __init__(self, shards: ShardStore, ledger: LedgerKeeper, dtype: torch.dtype) -> None:
        super().__init__(shards)
        self._ledger = ledger
        self._dtype = dtype
        self._groups: dict[int, _Group] = {}

    def collect(self, index: int, bucket: Bucket, refs: Sequence[ParamRef]) -> None:
        group = self._group(refs)
        grads = self._full(group.params, group.owners)
        self._drop(refs, group.params, group.owners, grads)
        if not self._stay(group, grads):
            self._copy(group, grads)
        for param in group.params:
            param.has_grad = True

    def reduce(self, index: int) -> None:
        """There is nothing left to do."""

    def drain(self, keep: int = 0) -> None:
        """There is nothing left to do."""

    def abandon(self) -> None:
        """There is nothing left to do."""

    def forget(self) -> None:
        self._groups.clear()

    def _group(self, refs: Sequence[ParamRef]) -> _Group:
        group = self._groups.get(id(refs))
        if group is None or group.refs is not refs or group.found_among is not self._shards.trainable:
            if len(self._groups) >= _REMEMBERED:
                self._groups.clear()  # of schedules that are long gone
            group = self._groups[id(refs)] = _Group(refs, self._shards)
        return group

    def _stay(self, group: _Group, grads: Sequence[torch.Tensor | None]) -> bool:
        """Let the units take the gradients for their own, where they are; returns whether they did."""
        if not group.can_stay or any(map(self._shards.has_grads, group.units)):
            return False
        if not self._shards.keeps_fp32_grads or self._dtype is not torch.float32:
            return False
        if any(grad is None or grad.dtype is not torch.float32 for grad in grads):
            return False
        return self._shards.adopt_grads(group.units, [grad.reshape(-1) for grad in grads if grad is not None])

    def _copy(self, group: _Group, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy the gradients to the units' own, or add them to what is there."""
        held = sum(grad.nbytes for grad in grads if grad is not None)
        self._ledger.add(ByteClass.GRADIENT, held)
        for unit in group.units:
            self._shards.make_grads(unit)
        pairs = [
            (param, param.grad[: param.numel], grad.reshape(-1).to(self._dtype))
            for param, grad in zip(group.params, grads, strict=True)
            if grad is not None and param.grad is not None
        ]
        add_into([target for _, target, _ in pairs], [flat for *_, flat in pairs], [p for p, *_ in pairs])
        self._ledger.add(ByteClass.GRADIENT, -held)

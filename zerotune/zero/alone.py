"""What a rank that is alone does with its gradients: they are the sums, and stay where autograd put them if they can."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import torch

from zerotune.engine import LedgerKeeper
from zerotune.records import ByteClass
from zerotune.schedule import Bucket, ParamRef
from zerotune.zero.collector import Collector, add_into
from zerotune.zero.shards import ShardedParam, ShardStore

_REMEMBERED = 4096
"""Groups of parameters that are remembered."""


class _OfUnit:
    """Parameters of one unit that are collected together.

    Args:
        unit: Its index.
        params: They.
        shards: Where they are.
    """

    def __init__(self, unit: int, params: list[ShardedParam], shards: ShardStore) -> None:
        self.unit = unit
        self.params = params
        self.owners = [param.param for param in params]
        whole = shards.units[unit].trainable
        self.can_stay = len(whole) == len(params) and all(
            mine is its and mine.numel == mine.slice for mine, its in zip(params, whole, strict=True)
        )
        """Whether they are all that trains of the unit, in order, and nothing is padded."""


class _Group:
    """Parameters that are collected together, unit by unit.

    Args:
        refs: Which.
        shards: Where they are.
    """

    def __init__(self, refs: Sequence[ParamRef], shards: ShardStore) -> None:
        self.refs = refs
        self.found_among = shards.trainable
        """What trained when this was found."""
        self.units = [
            _OfUnit(unit, [shards[ref] for ref in each], shards)
            for unit, each in groupby(refs, key=attrgetter("unit"))
        ]


class LoneCollector(Collector):
    """Gradients of a rank that is alone become the shards' gradients, or are added to them, as soon as they are collected.

    Args:
        shards: The parameters.
        ledger: Counts bytes.
        dtype: Dtype that would travel; what is wider is rounded to it, as on many ranks.
    """

    def __init__(self, shards: ShardStore, ledger: LedgerKeeper, dtype: torch.dtype) -> None:
        super().__init__(shards, ledger)
        self._dtype = dtype
        self._groups: dict[int, _Group] = {}

    def collect(self, index: int, bucket: Bucket, refs: Sequence[ParamRef]) -> None:
        for each in self._group(refs).units:
            grads = self._full(each.params, each.owners)
            self._uncount(grads)
            if not self._stay(each, grads):
                self._copy(each, grads)
            self._drop(each.params, each.owners, grads)
            for param in each.params:
                param.has_grad = True
        self._collected.append(refs)

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

    def _stay(self, each: _OfUnit, grads: Sequence[torch.Tensor | None]) -> bool:
        """Let the unit take the gradients for its own, where they are; returns whether it did."""
        if not each.can_stay or self._shards.has_grads(each.unit):
            return False
        if not self._shards.keeps_fp32_grads or self._dtype is not torch.float32:
            return False
        if any(grad is None or grad.dtype is not torch.float32 for grad in grads):
            return False
        return self._shards.adopt_grads(each.unit, [grad.reshape(-1) for grad in grads if grad is not None])

    def _copy(self, each: _OfUnit, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy the gradients to the unit's own, or add them to what is there."""
        there = [(param, grad) for param, grad in zip(each.params, grads, strict=True) if grad is not None]
        held = sum(self._counted(grad) for _, grad in there)
        self._ledger.add(ByteClass.GRADIENT, held)
        try:
            self._shards.make_grads(each.unit)
            add_into(
                [None if param.grad is None else param.grad[: param.numel] for param, _ in there],
                [self._rounded(grad.reshape(-1)) for _, grad in there],
                [param for param, _ in there],
            )
        finally:
            self._ledger.add(ByteClass.GRADIENT, -held)

    def _is_wider(self, grad: torch.Tensor) -> bool:
        return grad.itemsize > self._dtype.itemsize

    def _rounded(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(self._dtype) if self._is_wider(grad) else grad

    def _counted(self, grad: torch.Tensor) -> int:
        """Bytes that a gradient and its rounded copy, if it needs one, take until they have been added."""
        return grad.nbytes + (grad.numel() * self._dtype.itemsize if self._is_wider(grad) else 0)

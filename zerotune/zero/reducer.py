"""Reducing gradients over ranks to the shards, bucket by bucket."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch

from zerotune.engine import LedgerKeeper
from zerotune.records import ByteClass
from zerotune.schedule import Bucket, Layout, ParamRef
from zerotune.zero.collector import Collector, add_into
from zerotune.zero.comm import Communicator, Work
from zerotune.zero.pool import BufferPool
from zerotune.zero.shards import ShardedParam, ShardStore

_REMEMBERED = 4096
"""Buckets whose members are remembered."""


class _Members:
    """What is known of a bucket for good.

    Args:
        bucket: The bucket.
        shards: Where its members are.
    """

    def __init__(self, bucket: Bucket, shards: ShardStore) -> None:
        self.bucket = bucket
        self.params = [shards[ref] for ref in bucket.params]
        self.owners = [param.param for param in self.params]
        self.names = tuple(param.name for param in self.params)
        self.units = list(dict.fromkeys(ref.unit for ref in bucket.params))
        self.sizes = [param.slice for param in self.params]
        self.width = sum(self.sizes)
        self.are_even = all(0 < param.numel == param.rows.shape[0] * param.slice for param in self.params)
        """Whether none of them is padded, nor empty."""
        ends = list(accumulate(self.sizes))
        self.columns = {
            ref: slice(end - size, end)
            for ref, size, end in zip(bucket.params, self.sizes, ends, strict=True)
        }
        self.compared_with: Sequence[ShardedParam] | None = None
        """What trained when ``are_whole_units`` was found."""
        self.are_whole_units = False
        """Whether they are all that trains of their units, in order."""


@dataclass
class _Filling:
    """A bucket that gradients are copied into: row r goes to rank r."""

    members: _Members
    rows: torch.Tensor  # [N, W]
    collected: list[Sequence[ParamRef]] = field(default_factory=list)


@dataclass
class _InFlight:
    """A bucket being reduced."""

    members: _Members
    work: Work
    sent: torch.Tensor
    received: torch.Tensor  # rows to be summed, of all ranks or of all others, or their sum, [W]
    is_sum: bool


class Reducer(Collector):
    """Copies gradients into buckets, and adds their sums over ranks to the shards' gradients.

    How many buckets exist at a time is the schedule's decision: it drains some before it begins another.

    Args:
        shards: The parameters.
        layout: Their sizes over N ranks.
        comm: Issues the collectives.
        pool: Buffers.
        ledger: Counts bytes.
        dtype: Dtype that travels; sums are fp32.
        replicate: Whether every rank gets the whole sum (stage 0).
    """

    def __init__(
        self,
        shards: ShardStore,
        layout: Layout,
        comm: Communicator,
        pool: BufferPool,
        ledger: LedgerKeeper,
        dtype: torch.dtype,
        replicate: bool,
    ) -> None:
        super().__init__(shards, ledger)
        self._ranks = layout.ranks
        self._comm = comm
        self._pool = pool
        self._dtype = dtype
        self._replicate = replicate
        self._members: dict[int, _Members] = {}
        self._filling: dict[int, _Filling] = {}
        self._in_flight: deque[_InFlight] = deque()

    def collect(self, index: int, bucket: Bucket, refs: Sequence[ParamRef]) -> None:
        """Copy full gradients into a bucket and free them."""
        filling = self._filling.get(index)
        if filling is None:
            filling = self._filling[index] = self._start(bucket)
        members = filling.members
        is_whole = len(refs) == len(members.params)
        params = members.params if is_whole else [self._shards[ref] for ref in refs]
        owners = members.owners if is_whole else [param.param for param in params]
        grads = self._full(params, owners)
        if (
            is_whole
            and members.are_even
            and all(grad is not None and grad.dtype is self._dtype for grad in grads)
        ):
            # What is whole and needs no padding goes in one operation.
            flat = [grad.detach().reshape(-1) for grad in grads if grad is not None]
            torch._chunk_cat(flat, 0, self._ranks, out=filling.rows)
        else:
            for ref, param, grad in zip(refs, params, grads, strict=True):
                _copy_rows(filling.rows[:, members.columns[ref]], grad, param.numel)
        self._drop(params, owners, grads)
        self._uncount(grads)
        self._collected.append(refs)
        filling.collected.append(refs)

    def reduce(self, index: int) -> None:
        filling = self._filling.pop(index)
        members = filling.members
        sent = filling.rows.view(-1)
        is_sum = not self._comm.sums_in_exchange(self._dtype)
        if is_sum:
            received = self._take(members.width, torch.float32)
            work = self._comm.reduce_scatter(received, sent, "gradient", members.names)
        else:
            received = self._take(members.width * self._comm.rows_received, self._dtype)
            work = self._comm.exchange(received, sent, "gradient", members.names)
            if work.left_out or self.left_out:
                self.left_out.update(dict.fromkeys(members.units, work.left_out))
        self._in_flight.append(_InFlight(members, work, sent, received, is_sum))

    def drain(self, keep: int = 0) -> None:
        while len(self._in_flight) > keep:
            if not self._comm.is_broken:
                self._finish(self._in_flight[0])
            else:
                self._lose(self._in_flight[0])
            self._in_flight.popleft()

    def _lose(self, reduction: _InFlight) -> None:
        """Keep what a collective that will not end may still read or write."""
        for buffer in (reduction.sent, reduction.received):
            self._ledger.add(ByteClass.GRADIENT, -buffer.nbytes)
            self._pool.lose(buffer)

    def abandon(self) -> None:
        unfinished = list(self._filling)
        for index in unfinished:
            filling = self._filling[index]
            collected = set(chain.from_iterable(filling.collected))
            for ref in filling.members.bucket.params:
                if ref not in collected:
                    filling.rows[:, filling.members.columns[ref]].zero_()
            self.drain(keep=1)
            self.reduce(index)

    def clear(self) -> None:
        for filling in self._filling.values():
            self._give(filling.rows.view(-1))
        self._filling.clear()
        self.drain()
        super().clear()

    def forget(self) -> None:
        self._members.clear()

    # ----------------------------------------------------------------------------------------------- inside

    def _start(self, bucket: Bucket) -> _Filling:
        members = self._members.get(id(bucket))
        if members is None or members.bucket is not bucket:
            if len(self._members) >= _REMEMBERED:
                self._members.clear()  # of schedules that are long gone
            members = self._members[id(bucket)] = _Members(bucket, self._shards)
        rows = self._take(self._ranks * members.width, self._dtype)
        return _Filling(members, rows.view(self._ranks, members.width))

    def _finish(self, reduction: _InFlight) -> None:
        reduction.work.wait()
        members = reduction.members
        if not reduction.is_sum and self._are_empty_units(members):
            self._sum_into(members.units, self._rows_to_sum(reduction))
        else:
            summed = reduction.received
            if not reduction.is_sum:
                summed = self._take(members.width, torch.float32)
                _sum_rows(summed, self._rows_to_sum(reduction))
            for unit in members.units:
                self._shards.make_grads(unit)
            if self._replicate:
                self._add_to_replicas(summed, members)
            else:
                add_into([p.grad for p in members.params], summed.split(members.sizes), members.params)
            if not reduction.is_sum:
                self._give(summed)
        for param in members.params:
            param.has_grad = True
        self._give(reduction.sent)
        self._give(reduction.received)

    def _rows_to_sum(self, reduction: _InFlight) -> list[torch.Tensor]:
        """Every rank's row, in rank order  # N of [W]"""
        own = reduction.sent.view(self._ranks, reduction.members.width)[self._comm.rank]
        return self._comm.rows_in_order(reduction.received, own)

    def _are_empty_units(self, members: _Members) -> bool:
        """Whether these are all that trains of their units, in order, none of which has a gradient yet: then the sum is
        the gradient, and needs no copy."""
        if self._replicate or not self._shards.keeps_fp32_grads:
            return False
        if members.compared_with is not self._shards.trainable:
            members.compared_with = self._shards.trainable
            whole = [param for unit in members.units for param in self._shards.units[unit].trainable]
            members.are_whole_units = len(whole) == len(members.params) and all(
                map(operator.is_, whole, members.params)
            )
        return members.are_whole_units and not any(map(self._shards.has_grads, members.units))

    def _sum_into(self, units: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Sum over ranks into the gradients of units that have none.

        Args:
            units: Whose slices stand in the rows one after the other.
            rows: One row per rank  # N of [W]
        """
        start = 0
        for unit in units:
            grads = self._shards.new_grads(unit)
            if grads is not None:
                end = start + grads.numel()
                _sum_rows(grads, [row[start:end] for row in rows] if len(units) > 1 else rows)
                start = end

    def _add_to_replicas(self, summed: torch.Tensor, members: _Members) -> None:
        """Stage 0: the other half of an all-reduce, so that every rank holds the whole sum."""
        received = self._take(self._comm.rows_received * members.width, torch.float32)
        self._comm.all_gather(received, summed, "gradient", members.names).wait()
        whole = [None if p.grad is None else p.grad.view(self._ranks, p.slice) for p in members.params]
        for rows, first, end in [*self._comm.own_row(summed), *self._comm.rows_of_others(received)]:
            columns = rows.split(members.sizes, dim=-1)
            where = first if rows.dim() == 1 else slice(first, end)
            add_into([None if grad is None else grad[where] for grad in whole], columns, members.params)
        self._give(received)

    def _take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = self._pool.take(numel, dtype)
        self._ledger.add(ByteClass.GRADIENT, buffer.nbytes)
        return buffer

    def _give(self, buffer: torch.Tensor) -> None:
        self._ledger.add(ByteClass.GRADIENT, -buffer.nbytes)
        self._pool.give(buffer)


def _copy_rows(target: torch.Tensor, gradient: torch.Tensor | None, numel: int) -> None:
    """Flatten, pad and split a gradient.

    Args:
        target: One row per rank  # [N, S]
        gradient: The full gradient; ``None`` counts as zeros  # ND
        numel: Its elements.
    """
    if gradient is None:
        target.zero_()
        return
    flat = gradient.detach().reshape(-1)
    ranks, size = target.shape
    if numel == ranks * size:
        target.copy_(flat.view(ranks, size))
        return
    whole, rest = divmod(numel, size)
    if whole:
        target[:whole].copy_(flat[: whole * size].view(whole, size))
    if whole < ranks:
        target[whole, :rest].copy_(flat[whole * size :])
        target[whole, rest:].zero_()
        target[whole + 1 :].zero_()


def _sum_rows(output: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """Sum over ranks in rank order, in the dtype of ``output``.

    Args:
        output: The sum  # [W]
        rows: One row per rank  # N of [W]
    """
    if len(rows) == 1:
        output.copy_(rows[0])
    elif rows[0].dtype is output.dtype:
        torch.add(rows[0], rows[1], out=output)
        for row in rows[2:]:
            output.add_(row)
    else:
        output.copy_(rows[0])
        for row in rows[1:]:
            output.add_(row)

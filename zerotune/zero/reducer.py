"""Reducing gradients to the shards, bucket by bucket."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from zerotune.engine import LedgerKeeper
from zerotune.records import ByteClass
from zerotune.schedule import Bucket, Layout, ParamRef
from zerotune.zero.comm import Communicator, Work
from zerotune.zero.pool import BufferPool
from zerotune.zero.shards import ShardedParam, ShardStore


@dataclass
class _Filling:
    """A bucket that gradients are copied into: row r goes to rank r."""

    members: dict[ParamRef, ShardedParam]
    columns: dict[ParamRef, slice]  # of ``rows``
    rows: torch.Tensor  # [N, W]
    collected: set[ParamRef] = field(default_factory=set)


@dataclass
class _InFlight:
    """A bucket being reduced."""

    members: list[ShardedParam]
    work: Work
    sent: torch.Tensor
    received: torch.Tensor  # rows to be summed, of all ranks or of all others, or their sum, [W]
    is_sum: bool

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.sent, self.received


class Reducer:
    """Full gradients in, sums over ranks added to the shards' gradients.

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
        self._shards = shards
        self._ranks = layout.ranks
        self._comm = comm
        self._pool = pool
        self._ledger = ledger
        self._dtype = dtype
        self._replicate = replicate
        self._filling: dict[int, _Filling] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._collected: set[ParamRef] = set()
        self.touched: set[ParamRef] = set()
        """Parameters that had a gradient on this rank since the set was last cleared."""
        self.looks_for_trouble = False
        """Whether to look at every full gradient, at the price of reading it once more, for :attr:`first_trouble`."""
        self.first_trouble: ShardedParam | None = None
        """The first parameter since it was last cleared whose gradient on this rank was not finite."""

    def collect(self, index: int, bucket: Bucket, refs: Sequence[ParamRef]) -> None:
        """Copy full gradients into a bucket and free them; a parameter without one counts as zeros.

        Args:
            index: The bucket's index, unique within the pass.
            bucket: Its members.
            refs: The members to collect now.
        """
        filling = self._filling.get(index)
        if filling is None:
            filling = self._filling[index] = self._start(bucket)
        params = [filling.members[ref] for ref in refs]
        grads = [param.param.grad for param in params]
        if self.looks_for_trouble:
            self._look_for_trouble(params, grads)
        if len(refs) == len(filling.members) and all(
            grad is not None and grad.dtype is self._dtype and 0 < grad.numel() == self._ranks * param.slice
            for param, grad in zip(params, grads, strict=True)
        ):
            # What is whole and needs no padding goes in one operation.
            flat = [grad.detach().reshape(-1) for grad in grads if grad is not None]
            torch._chunk_cat(flat, 0, self._ranks, out=filling.rows)
        else:
            for ref, param, grad in zip(refs, params, grads, strict=True):
                _copy_rows(filling.rows[:, filling.columns[ref]], grad, param.numel)
        for ref, param, grad in zip(refs, params, grads, strict=True):
            if grad is not None:
                param.param.grad = None
                self.touched.add(ref)
        filling.collected.update(refs)
        self._collected.update(refs)

    def _look_for_trouble(self, params: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]) -> None:
        for param, grad in zip(params, grads, strict=True):
            if self.first_trouble is not None:
                return
            if grad is not None and not bool(grad.isfinite().all()):
                self.first_trouble = param

    def uncollected(self) -> list[ParamRef]:
        """Trainable parameters that no bucket of this pass took yet, or whose gradient came after it did."""
        return [
            p.ref for p in self._shards.trainable if p.ref not in self._collected or p.param.grad is not None
        ]

    def late(self) -> list[ParamRef]:
        """Parameters whose gradient is still full: autograd delivered it after their bucket was filled."""
        return [p.ref for p in self._shards.trainable if p.param.grad is not None]

    def end_pass(self) -> None:
        """The next bucket belongs to a new pass."""
        self._collected.clear()

    def reduce(self, index: int) -> None:
        """Issue the reduction of a bucket."""
        filling = self._filling.pop(index)
        width = filling.rows.shape[1]
        sent = filling.rows.view(-1)
        members = list(filling.members.values())
        names = [param.name for param in members]
        if self._ranks == 1 or self._comm.sums_in_exchange(self._dtype):
            received = self._take(width * self._comm.rows_received, self._dtype)
            work = self._comm.exchange(received, sent, "gradient", names)
            is_sum = False
        else:
            received = self._take(width, torch.float32)
            work = self._comm.reduce_scatter(received, sent, "gradient", names)
            is_sum = True
        self._in_flight.append(_InFlight(members, work, sent, received, is_sum))

    def drain(self, keep: int = 0) -> None:
        """Finish the oldest reductions until at most ``keep`` are in flight; none will finish if ranks diverged."""
        while len(self._in_flight) > keep:
            if not self._comm.is_broken:
                self._finish(self._in_flight[0])
            else:
                for buffer in self._in_flight[0].buffers:
                    self._ledger.add(ByteClass.GRADIENT, -buffer.nbytes)
                    self._pool.lose(buffer)
            self._in_flight.popleft()

    def abandon(self) -> None:
        """Reduce what has been collected of unfinished buckets as it stands.

        For a pass that leaves the recorded order: members that were not collected travel as zeros, and come later.
        """
        unfinished = list(self._filling)
        for index in unfinished:
            filling = self._filling[index]
            for ref in filling.members:
                if ref not in filling.collected:
                    filling.rows[:, filling.columns[ref]].zero_()
            self.drain(keep=1)
            self.reduce(index)

    def clear(self) -> None:
        """Drop everything, after an error."""
        for filling in self._filling.values():
            self._give(filling.rows.view(-1))
        self._filling.clear()
        self._collected.clear()
        self.drain()

    # ----------------------------------------------------------------------------------------------- inside

    def _start(self, bucket: Bucket) -> _Filling:
        members = {ref: self._shards[ref] for ref in bucket.params}
        ends = list(accumulate(param.slice for param in members.values()))
        columns = {
            ref: slice(end - param.slice, end)
            for (ref, param), end in zip(members.items(), ends, strict=True)
        }
        rows = self._take(self._ranks * ends[-1], self._dtype).view(self._ranks, ends[-1])
        return _Filling(members, columns, rows)

    def _finish(self, reduction: _InFlight) -> None:
        reduction.work.wait()
        width = sum(param.slice for param in reduction.members)
        is_sum = reduction.is_sum
        rows = [reduction.received] if is_sum else self._rows_to_sum(reduction, width)
        units = None if is_sum else self._empty_units(reduction.members)
        if units is not None:
            self._sum_into(units, rows)
        else:
            summed = rows[0]
            if not is_sum:
                summed = self._take(width, torch.float32)
                _sum_rows(summed, rows)
            for unit in dict.fromkeys(param.ref.unit for param in reduction.members):
                self._shards.make_grads(unit)
            if self._replicate:
                self._add_to_replicas(summed, reduction.members)
            else:
                slices = summed.split([param.slice for param in reduction.members])
                self._add([p.grad for p in reduction.members], slices, reduction.members)
            if not is_sum:
                self._give(summed)
        for param in reduction.members:
            param.has_grad = True
        for buffer in reduction.buffers:
            self._give(buffer)

    def _rows_to_sum(self, reduction: _InFlight, width: int) -> list[torch.Tensor]:
        """Every rank's row, in rank order  # N of [W]"""
        own = reduction.sent.view(self._ranks, width)[self._comm.rank]
        return [row for rows, _, _ in self._comm.parts(reduction.received, own) for row in rows]

    def _empty_units(self, members: Sequence[ShardedParam]) -> list[int] | None:
        """The units whose parameters these are, if they are all that train, in order, and none has a gradient yet: then
        the sum is the gradient, and needs no copy."""
        if self._replicate or not self._shards.keeps_fp32_grads:
            return None
        units = list(dict.fromkeys(param.ref.unit for param in members))
        whole = [param for unit in units for param in self._shards.units[unit].trainable]
        if len(whole) != len(members) or any(self._shards.has_grads(unit) for unit in units):
            return None
        return units if all(map(operator.is_, whole, members)) else None

    def _sum_into(self, units: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Sum over ranks into the gradients of units that have none.

        Args:
            units: Whose slices stand in the rows one after the other.
            rows: One row per rank  # N of [W]
        """
        start = 0
        for unit in units:
            grads = self._shards.make_grads(unit, zeros=False)
            if grads is not None:
                end = start + grads.numel()
                _sum_rows(grads, [row[start:end] for row in rows])
                start = end

    def _add_to_replicas(self, summed: torch.Tensor, members: Sequence[ShardedParam]) -> None:
        """Stage 0: the other half of an all-reduce, so that every rank holds the whole sum."""
        received = self._take(self._comm.rows_received * summed.numel(), torch.float32)
        self._comm.all_gather(received, summed, "gradient", [param.name for param in members]).wait()
        whole = [None if p.grad is None else p.grad.view(self._ranks, p.slice) for p in members]
        for rows, first, end in self._comm.parts(received, summed):
            columns = rows.split([p.slice for p in members], dim=1)
            self._add([None if grad is None else grad[first:end] for grad in whole], columns, members)
        self._give(received)

    def _add(
        self,
        targets: Sequence[torch.Tensor | None],
        sums: Sequence[torch.Tensor],
        members: Sequence[ShardedParam],
    ) -> None:
        """Put sums into gradients that are empty, add them to those that are not."""
        for has_grad, put in ((False, torch._foreach_copy_), (True, torch._foreach_add_)):
            pairs = [
                (target, total)
                for target, total, param in zip(targets, sums, members, strict=True)
                if target is not None and param.has_grad is has_grad
            ]
            if pairs:
                put([target for target, _ in pairs], [total for _, total in pairs])

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

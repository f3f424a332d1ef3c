"""Reducing gradients over ranks to the shards, bucket by bucket.

[Note: gradients that stay]
Where rows may travel in pieces, full gradients are sent from where autograd put them, and stay there until they have been
taken: a bucket is then no memory, but the order in which they travel. They are copied into a buffer, flattened, padded and
split, where that cannot be: on NCCL, where gloo has to carry, in buckets of very many, for a gradient that is missing, of
another dtype than travels, or a part of something larger. What pads them on their way is read from zeros that are there for that.
Of what comes, the row of the first other rank lands in the shards' gradients if these are empty and fp32, and the rest is
added to it.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from zerotune.engine import LedgerKeeper
from zerotune.records import ByteClass
from zerotune.schedule import SLICE_MULTIPLE, Bucket, Layout, ParamRef
from zerotune.zero.buckets import Filling, Members, Reduction
from zerotune.zero.collector import Collector, add_into
from zerotune.zero.comm import Communicator
from zerotune.zero.flights import Place, place_of
from zerotune.zero.pool import BufferPool
from zerotune.zero.shards import ShardedParam, ShardStore

_REMEMBERED = 4096
"""Buckets whose members are remembered."""


class Reducer(Collector):
    """Sends gradients, bucket by bucket, and adds their sums over ranks to the shards' gradients.

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
        self._members: dict[int, Members] = {}
        self._filling: dict[int, Filling] = {}
        self._in_flight: deque[Reduction] = deque()
        self._padding = torch.zeros(SLICE_MULTIPLE * layout.ranks, dtype=dtype, device="cpu")
        """No parameter has more; what is sent from where it is, is on CPU."""

    def collect(self, index: int, bucket: Bucket, refs: Sequence[ParamRef]) -> None:
        """Take full gradients into a bucket: note where they are, or copy and free them."""
        filling = self._filling.get(index)
        if filling is None:
            filling = self._filling[index] = Filling(self._members_of(bucket))
        members = filling.members
        is_whole = len(refs) == len(members.params)
        params = members.params if is_whole else [self._shards[ref] for ref in refs]
        owners = members.owners if is_whole else [param.param for param in params]
        grads = self._full(params, owners)
        if filling.rows is None and members.may_travel_in_pieces and self._may_stay(grads):
            self._uncount(grads)
            self._stay(filling, refs, grads)
        else:
            self._copy(filling, refs, params, grads)
            self._uncount(grads)
        self._drop(params, owners, grads)
        self._collected.append(refs)
        filling.collected.append(refs)

    def reduce(self, index: int) -> None:
        filling = self._filling.pop(index)
        members = filling.members
        if filling.rows is None:
            reduction = self._send_pieces(members, [filling.stay[ref] for ref in members.bucket.params])
        elif self._comm.sums_in_exchange(self._dtype):
            sent = filling.rows.view(-1)
            received = self._take(members.width * self._comm.rows_received, self._dtype)
            work = self._comm.exchange(received, sent, "gradient", members.names)
            reduction = Reduction(members, work, [sent], False, received)
        else:
            sent = filling.rows.view(-1)
            received = self._take(members.width, torch.float32)
            work = self._comm.reduce_scatter(received, sent, "gradient", members.names)
            reduction = Reduction(members, work, [sent], False, received, is_sum=True)
        left_out = reduction.work.left_out
        if left_out or self.left_out:
            self.left_out.update(dict.fromkeys(members.units, left_out))
        self._in_flight.append(reduction)

    def drain(self, keep: int = 0) -> None:
        while len(self._in_flight) > keep:
            if not self._comm.is_broken:
                self._finish(self._in_flight[0])
            else:
                self._lose(self._in_flight[0])
            self._in_flight.popleft()

    def _lose(self, reduction: Reduction) -> None:
        """Keep what a collective that will not end may still read or write."""
        for buffer in (*reduction.sent, reduction.received):
            if buffer is not None:
                self._ledger.add(ByteClass.GRADIENT, -buffer.nbytes)
                self._pool.lose(buffer)

    def abandon(self) -> None:
        unfinished = list(self._filling)
        for index in unfinished:
            filling = self._filling[index]
            collected = set(chain.from_iterable(filling.collected))
            for ref in filling.members.bucket.params:
                if ref not in collected:
                    self._rows_of(filling)[:, filling.members.columns[ref]].zero_()
            self.drain(keep=1)
            self.reduce(index)

    def clear(self) -> None:
        for filling in self._filling.values():
            if filling.rows is not None:
                self._give(filling.rows.view(-1))
            self._uncount_stayed(filling.stay.values())
        self._filling.clear()
        self.drain()
        super().clear()

    def forget(self) -> None:
        self._members.clear()

    # ----------------------------------------------------------------------------------------------- inside

    def _members_of(self, bucket: Bucket) -> Members:
        members = self._members.get(id(bucket))
        if members is None or members.bucket is not bucket:
            if len(self._members) >= _REMEMBERED:
                self._members.clear()  # of schedules that are long gone
            members = self._members[id(bucket)] = Members(bucket, self._shards, self._ranks)
        return members

    def _may_stay(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether gradients can be sent from where they are: each is all of its memory, and travels as it is."""
        return self._comm.carries_pieces and all(
            grad is not None
            and grad.dtype is self._dtype
            and grad.is_contiguous()
            and grad.untyped_storage().nbytes() == grad.nbytes
            for grad in grads
        )

    def _stay(self, filling: Filling, refs: Sequence[ParamRef], grads: Sequence[torch.Tensor | None]) -> None:
        for ref, grad in zip(refs, grads, strict=True):
            assert grad is not None
            filling.stay[ref] = grad.detach().view(-1)
        self._ledger.take(ByteClass.GRADIENT, [filling.stay[ref] for ref in refs])

    def _uncount_stayed(self, grads: Iterable[torch.Tensor]) -> None:
        self._ledger.add(ByteClass.GRADIENT, -sum(grad.nbytes for grad in grads))

    def _copy(
        self,
        filling: Filling,
        refs: Sequence[ParamRef],
        params: Sequence[ShardedParam],
        grads: Sequence[torch.Tensor | None],
    ) -> None:
        rows, members = self._rows_of(filling), filling.members
        if (
            len(refs) == len(members.params)
            and members.are_even
            and all(grad is not None and grad.dtype is self._dtype for grad in grads)
        ):
            # What is whole and needs no padding goes in one operation.
            flat = [grad.detach().reshape(-1) for grad in grads if grad is not None]
            torch._chunk_cat(flat, 0, self._ranks, out=rows)
        else:
            for ref, param, grad in zip(refs, params, grads, strict=True):
                _copy_rows(rows[:, members.columns[ref]], grad, param.numel)

    def _rows_of(self, filling: Filling) -> torch.Tensor:
        """Where gradients are copied to  # [N, W]; from now on all of the bucket are, those that had come first."""
        if filling.rows is None:
            members = filling.members
            filling.rows = self._take(self._ranks * members.width, self._dtype).view(
                self._ranks, members.width
            )
            for ref, grad in filling.stay.items():
                _copy_rows(filling.rows[:, members.columns[ref]], grad, grad.numel())
            self._uncount_stayed(filling.stay.values())
            filling.stay.clear()
        return filling.rows

    def _send_pieces(self, members: Members, grads: list[torch.Tensor]) -> Reduction:
        """Reduce gradients that stay where they are  # each 1D, not padded"""
        comm = self._comm
        others = [rank for rank in range(self._ranks) if rank != comm.rank]
        sources = {rank: members.places(grads, rank, self._padding) for rank in others}
        targets: list[torch.Tensor] = []
        if (
            self._dtype is torch.float32
            and self._are_empty_units(members)
            and not self._is_under_way(members)
        ):
            made = [self._shards.new_grads(unit) for unit in members.units]
            targets = [flat for flat in made if flat is not None]
        keep = [*grads, *targets, self._padding]
        places: dict[int, list[Place]] = {}
        received, rest = None, others
        if targets:
            places[others[0]] = [place_of(target) for target in targets]
            rest = others[1:]
        if rest:
            received = self._take(members.width * len(rest), self._dtype)
            keep.append(received)
            rows = received.view(len(rest), members.width).unbind()
            places |= {rank: [place_of(into)] for rank, into in zip(rest, rows, strict=True)}
        elements = members.width * self._ranks
        work = comm.exchange_pieces(sources, places, tuple(keep), elements, "gradient", members.names)
        return Reduction(members, work, grads, True, received, landing=others[0] if targets else None)

    def _is_under_way(self, members: Members) -> bool:
        """Whether another bucket with parameters of the same units is."""
        units = set(members.units)
        return any(not units.isdisjoint(other.members.units) for other in self._in_flight)

    def _finish(self, reduction: Reduction) -> None:
        reduction.work.wait()
        members = reduction.members
        if reduction.landing is not None:
            self._add_to_landed(reduction, reduction.landing)
        elif not reduction.is_sum and self._are_empty_units(members):
            with self._rows_to_sum(reduction) as rows:
                self._sum_into(members.units, rows)
        else:
            summed = reduction.received
            if not reduction.is_sum:
                summed = self._take(members.width, torch.float32)
                with self._rows_to_sum(reduction) as rows:
                    _sum_rows(summed, rows)
            assert summed is not None
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
        if reduction.stays:
            self._uncount_stayed(reduction.sent)
        else:
            self._give(*reduction.sent)
        if reduction.received is not None:
            self._give(reduction.received)

    def _add_to_landed(self, reduction: Reduction, landing: int) -> None:
        """Add the other rows, in rank order, to the one that lies in the shards' gradients. That it comes first, and not
        after this rank's own where that is rank 0, changes no bit of a sum of two."""
        members = reduction.members
        sums = [param.grad for param in members.params if param.grad is not None]
        others = () if reduction.received is None else reduction.received.split(members.width)
        rows = iter(others)
        for rank in range(self._ranks):
            if rank == self._comm.rank:
                own = members.pieces(reduction.sent, rank)
                torch._foreach_add_([s[: len(o)] for s, o in zip(sums, own, strict=True)], own)
            elif rank != landing:
                torch._foreach_add_(sums, next(rows).split(members.sizes))

    @contextmanager
    def _rows_to_sum(self, reduction: Reduction) -> Iterator[list[torch.Tensor]]:
        """Every rank's row, in rank order  # N of [W]"""
        assert reduction.received is not None
        members, rank = reduction.members, self._comm.rank
        if reduction.stays:
            own = self._take(members.width, self._dtype)
            try:
                pieces = members.pieces(reduction.sent, rank)
                for row, piece in zip(own.split(members.sizes), pieces, strict=True):
                    row[: len(piece)].copy_(piece)
                    row[len(piece) :].zero_()
                yield self._comm.rows_in_order(reduction.received, own)
            finally:
                self._give(own)
        else:
            own = reduction.sent[0].view(self._ranks, members.width)[rank]
            yield self._comm.rows_in_order(reduction.received, own)

    def _are_empty_units(self, members: Members) -> bool:
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

    def _add_to_replicas(self, summed: torch.Tensor, members: Members) -> None:
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

"""Full parameters: gathered, completed, released."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from zerotune.engine import LedgerKeeper
from zerotune.records import ByteClass
from zerotune.zero.comm import Communicator, Work
from zerotune.zero.pool import BufferPool
from zerotune.zero.shards import ShardedParam, ShardedUnit, ShardStore, SlicesInTurn


@dataclass(eq=False)
class _InFlight:
    """One AllGather under way."""

    units: tuple[int, ...]
    sharded: tuple[ShardedUnit, ...]
    work: Work
    in_turn: SlicesInTurn
    shard: torch.Tensor  # [H + W]: what is sent; on CUDA another stream reads it until it lands
    buffer: (
        torch.Tensor
    )  # [R, H + W]: rows of all ranks or of all others, each with a tag, if any travels, and slices
    head: int  # H
    live: int  # elements of the parameters that it carries
    nbytes: int  # that were allocated for it


@dataclass(frozen=True)
class _Refresh:
    """Persistent parameters that are refreshed in one AllGather, and the names of their units."""

    in_turn: SlicesInTurn
    names: list[str]


class Gatherer:
    """Carries out gathers, waits and releases; which and when is the schedule's decision.

    Args:
        shards: The parameters.
        ranks: Number of ranks, N.
        comm: Issues the collectives.
        pool: Buffers.
        ledger: Counts bytes and live elements.
        dtype: Dtype that travels.
    """

    def __init__(
        self,
        shards: ShardStore,
        ranks: int,
        comm: Communicator,
        pool: BufferPool,
        ledger: LedgerKeeper,
        dtype: torch.dtype,
    ) -> None:
        self._shards = shards
        self._ranks = ranks
        self._comm = comm
        self._pool = pool
        self._ledger = ledger
        self._dtype = dtype
        self._joint: dict[tuple[int, ...], SlicesInTurn] = {}
        self._refreshes: list[_Refresh] | None = None
        self.complete: set[int] = set()
        self.in_flight: dict[int, _InFlight] = {}

    def gather(self, units: Sequence[int], purpose: str) -> None:
        """Issue one AllGather for units that are neither complete nor in flight."""
        wanted = tuple(u for u in units if u not in self.complete and u not in self.in_flight)
        if not wanted:
            return
        sharded = tuple(self._shards.units[unit] for unit in wanted)
        in_turn = self._in_turn(wanted, sharded)
        head = self._comm.head_elements
        shard, nbytes = self._to_send([unit.flat for unit in sharded], head)
        buffer = self._pool.take(self._comm.rows_received * (head + in_turn.width), self._dtype)
        nbytes += buffer.nbytes
        work = self._comm.all_gather(buffer, shard, purpose, [unit.name for unit in sharded], head)
        live = self._ranks * in_turn.width  # tags take memory but are no elements of parameters
        flight = _InFlight(wanted, sharded, work, in_turn, shard, buffer, head, live, nbytes)
        self._ledger.add(ByteClass.FULL, nbytes)  # not before: if ranks diverged, nothing is in flight
        self._ledger.add_live(live)
        for unit in wanted:
            self.in_flight[unit] = flight

    def wait(self, units: Sequence[int]) -> None:
        """Make units complete: wait for their gathers and copy every parameter out to its own storage."""
        for unit in units:
            flight = self.in_flight.get(unit)
            if flight is not None:
                self._land(flight)

    def expose(self, units: Sequence[int]) -> None:
        """A use of units begins: reads of them are none of our business until :meth:`conceal`."""
        for unit in units:
            self._shards.units[unit].expose()

    def conceal(self, units: Iterable[int]) -> None:
        """No use of units is open any more."""
        for unit in units:
            self._shards.units[unit].conceal()

    def release(self, units: Sequence[int]) -> None:
        """Free the full parameters of units that are complete."""
        for unit in units:
            if unit in self.complete:
                self.complete.discard(unit)
                sharded = self._shards.units[unit]
                sharded.free()
                self._ledger.release(sharded.name)
                self._ledger.add(ByteClass.FULL, -sharded.full_bytes)
                self._ledger.add_live(-(sharded.width * self._ranks))

    def keep_for_good(self, unit: int) -> None:
        """Make a complete unit persistent: it is never released again, and refreshed with the persistent ones."""
        assert unit in self.complete
        self.complete.discard(unit)
        sharded = self._shards.units[unit]
        self._ledger.add_live(-(sharded.flat.numel() * self._ranks))
        for param in sharded.gathered:
            param.persistent = True
            self._shards.persistent.append(param)
        self._refreshes = None

    def end_keeping(self, unit: int) -> None:
        """Undo :meth:`keep_for_good`, between steps: the unit is released, and gathered for its uses again."""
        sharded = self._shards.units[unit]
        for param in sharded.gathered:
            param.persistent = False
        self._shards.persistent[:] = [param for param in self._shards.persistent if param.persistent]
        self._refreshes = None
        self._ledger.add_live(sharded.flat.numel() * self._ranks)
        self.complete.add(unit)
        self.release((unit,))

    def release_all(self) -> None:
        """Free everything that is live; gathers that nobody waited for are waited for and dropped."""
        for flight in list(dict.fromkeys(self.in_flight.values())):
            self._drop(flight, reuse=flight.work.settle())
        self.release(sorted(self.complete))

    def refresh_persistent(self, bucket_size: int | None) -> Iterator[None]:
        """Bring the persistent parameters up to date on every rank, bucket by bucket; one is in flight at each ``yield``.

        Args:
            bucket_size: Elements per AllGather, at most (a larger parameter goes alone); ``None`` for one AllGather.
        """
        if self._refreshes is None:
            self._refreshes = [self._refresh(params) for params in self._refresh_buckets(bucket_size)]
        for refresh in self._refreshes:
            shard, nbytes = self._to_send([p.shard for p in refresh.in_turn.params])
            buffer = self._pool.take(self._comm.rows_received * refresh.in_turn.width, self._dtype)
            nbytes += buffer.nbytes
            self._ledger.add(ByteClass.FULL, nbytes)
            work = self._comm.all_gather(buffer, shard, "refresh", refresh.names)
            yield
            work.wait()
            for rows, first, end in [*self._comm.own_row(shard), *self._comm.rows_of_others(buffer)]:
                refresh.in_turn.copy_out(rows, first, end)
            self._ledger.add(ByteClass.FULL, -nbytes)
            self._pool.give(buffer)

    def _refresh(self, params: Sequence[ShardedParam]) -> _Refresh:
        names = dict.fromkeys(self._shards.units[p.ref.unit].name for p in params)
        return _Refresh(SlicesInTurn(params), list(names))

    def _refresh_buckets(self, bucket_size: int | None) -> list[list[ShardedParam]]:
        buckets: list[list[ShardedParam]] = []
        size = 0
        for param in self._shards.persistent:
            if buckets and (bucket_size is None or size + param.numel <= bucket_size):
                buckets[-1].append(param)
                size += param.numel
            else:
                buckets.append([param])
                size = param.numel
        return buckets

    # ----------------------------------------------------------------------------------------------- inside

    def _in_turn(self, units: tuple[int, ...], sharded: tuple[ShardedUnit, ...]) -> SlicesInTurn:
        if len(sharded) == 1:
            return sharded[0].in_turn
        found = self._joint.get(units)
        if found is None:
            found = self._joint[units] = SlicesInTurn([p for unit in sharded for p in unit.gathered])
        return found

    def _to_send(self, slices: list[torch.Tensor], head: int = 0) -> tuple[torch.Tensor, int]:
        """What this rank sends, and the bytes that were allocated for it.

        Args:
            slices: What it consists of.
            head: Room for a tag before them.
        """
        if len(slices) == 1 and not head:
            return slices[0], 0
        if self._ranks == 1:  # nobody reads it
            return slices[0].new_empty(1).expand(sum(piece.numel() for piece in slices)), 0
        if head:
            slices.insert(0, slices[0].new_empty(head))
        shard = torch.cat(slices)
        return shard, shard.nbytes

    def _land(self, flight: _InFlight) -> None:
        sharded = flight.sharded
        taken = sum(unit.full_bytes for unit in sharded)
        for unit in sharded:
            unit.allocate()
        self._ledger.add(ByteClass.FULL, taken)
        try:
            with _labelled("copy_out", sharded):
                for rows, first, end in self._comm.own_row(flight.shard):  # beside what still travels
                    flight.in_turn.copy_out(rows, first, end)
                flight.work.wait()
                for rows, first, end in self._comm.rows_of_others(flight.buffer):
                    flight.in_turn.copy_out(rows[:, flight.head :] if flight.head else rows, first, end)
        except BaseException:
            for unit in sharded:
                unit.free()
            self._ledger.add(ByteClass.FULL, -taken)
            raise
        self._ledger.add_live(flight.live)
        self.complete.update(flight.units)
        self._drop(flight)

    def _drop(self, flight: _InFlight, reuse: bool = True) -> None:
        for unit in flight.units:
            del self.in_flight[unit]
        self._ledger.add(ByteClass.FULL, -flight.nbytes)
        self._ledger.add_live(-flight.live)
        if not reuse:
            self._pool.lose(flight.buffer)
        else:
            self._pool.give(flight.buffer)


def _labelled(what: str, units: Iterable[ShardedUnit]) -> AbstractContextManager[object]:
    """A label for torch's profiler, while it is on."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"zerotune::{what}({', '.join(u.name for u in units)})")

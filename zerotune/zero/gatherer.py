"""Full parameters: gathered, completed, released."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from zerotune.engine import LedgerKeeper
from zerotune.models.marks import is_profiled
from zerotune.records import ByteClass
from zerotune.zero.comm import Communicator, Work
from zerotune.zero.pool import BufferPool
from zerotune.zero.shards import ShardedParam, ShardedUnit, ShardStore, SlicesInTurn


class _Outgoing:
    """Slices that a rank sends together.

    Args:
        slices: One after the other  # 1D
        head: Elements of a tag that travels before them, H.
    """

    def __init__(self, slices: list[torch.Tensor], head: int = 0) -> None:
        self._slices = slices
        self._head = head
        self.width = head + sum(piece.numel() for piece in slices)

    def together(self) -> tuple[torch.Tensor, int]:
        """Room for a tag, and the slices  # [H + W]; and the bytes that were allocated to put them together."""
        if len(self._slices) == 1 and not self._head:
            return self._slices[0], 0
        head = [self._slices[0].new_empty(self._head)] if self._head else []
        shard = torch.cat([*head, *self._slices])
        return shard, shard.nbytes


class _Together:
    """Units that are gathered in one AllGather.

    Args:
        units: Their indices.
        sharded: They themselves.
        ranks: Number of ranks, N.
        head: Elements of a tag that travels before their slices, H.

    Attributes:
        live: Elements of the parameters; tags take memory but are none.
    """

    def __init__(self, units: tuple[int, ...], sharded: Sequence[ShardedUnit], ranks: int, head: int) -> None:
        self.units = units
        self.sharded = sharded
        self.names = tuple(unit.name for unit in sharded)
        self.full_bytes = sum(unit.full_bytes for unit in sharded)
        self.in_turn = SlicesInTurn([param for unit in sharded for param in unit.gathered])
        self.outgoing = _Outgoing([unit.flat for unit in sharded], head)
        self.live = ranks * self.in_turn.width


@dataclass(eq=False, slots=True)
class _InFlight:
    """One AllGather under way."""

    together: _Together
    work: Work
    shard: torch.Tensor  # [H + W]: what is sent; on CUDA another stream reads it until it lands
    buffer: torch.Tensor
    """[R, H + W]: rows of all ranks or of all others, each with a tag, if any travels, and slices."""
    nbytes: int  # that were allocated for it


@dataclass(frozen=True)
class _Refresh:
    """Persistent parameters that are refreshed in one AllGather, and the names of their units."""

    in_turn: SlicesInTurn
    outgoing: _Outgoing
    names: list[str]


class Gatherer:
    """Carries out gathers, waits and releases; which and when is the schedule's decision.

    A rank that is alone has nothing to gather: all its parameters are persistent, and none is a copy.

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
        self._gathered_together: dict[tuple[int, ...], _Together] = {}
        self._refreshes: list[_Refresh] | None = None
        self._head = comm.head_elements
        self._rows_received = comm.rows_received
        self.complete: set[int] = set()
        self.in_flight: dict[int, _InFlight] = {}

    def gather(self, units: Sequence[int], purpose: str) -> None:
        """Issue one AllGather for units that are neither complete nor in flight."""
        together = self._together(tuple(units))
        if together is None:
            return
        shard, nbytes = together.outgoing.together()
        buffer = self._take(together.outgoing.width)
        work = self._comm.all_gather(buffer, shard, purpose, together.names, self._head)
        nbytes += buffer.nbytes
        flight = _InFlight(together, work, shard, buffer, nbytes)
        # Not before: if ranks diverged, nothing is in flight.
        self._ledger.add(ByteClass.FULL, nbytes)
        self._ledger.add_live(together.live)
        for unit in together.units:
            self.in_flight[unit] = flight

    def wait(self, units: Sequence[int]) -> None:
        """Make units complete: wait for their gathers and copy every parameter out to its own storage."""
        for unit in units:
            flight = self.in_flight.get(unit)
            if flight is not None:
                self._land(flight)

    def watches(self, unit: int) -> bool:
        """Whether reads of a unit's parameters are reported while no use of it is open."""
        return self._shards.units[unit].is_watched

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
                if self._ledger.is_recording:
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

    def forget(self) -> None:
        """Let go of what is remembered of units that are no more."""
        self._gathered_together.clear()
        self._refreshes = None

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
            shard, nbytes = refresh.outgoing.together()
            buffer = self._take(refresh.in_turn.width)
            nbytes += buffer.nbytes
            self._ledger.add(ByteClass.FULL, nbytes)
            work = self._comm.all_gather(buffer, shard, "refresh", refresh.names)
            yield
            work.wait()
            for rows, first, end in [*self._comm.own_row(shard), *self._comm.rows_of_others(buffer)]:
                refresh.in_turn.copy_out(rows, first, end)
            self._pool.give(buffer)
            self._ledger.add(ByteClass.FULL, -nbytes)

    def _refresh(self, params: Sequence[ShardedParam]) -> _Refresh:
        names = dict.fromkeys(self._shards.units[p.ref.unit].name for p in params)
        return _Refresh(SlicesInTurn(params), _Outgoing([p.shard for p in params]), list(names))

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

    def _together(self, units: tuple[int, ...]) -> _Together | None:
        """Those of the units that are neither complete nor in flight."""
        complete, in_flight = self.complete, self.in_flight
        for unit in units:
            if unit in complete or unit in in_flight:
                units = tuple(u for u in units if u not in complete and u not in in_flight)
                break
        if not units:
            return None
        found = self._gathered_together.get(units)
        if found is None:
            sharded = [self._shards.units[unit] for unit in units]
            found = self._gathered_together[units] = _Together(units, sharded, self._ranks, self._head)
        return found

    def _take(self, width: int) -> torch.Tensor:
        """Room for what a gather brings  # [R * width]"""
        return self._pool.take(self._rows_received * width, self._dtype)

    def _land(self, flight: _InFlight) -> None:
        together = flight.together
        for unit in together.sharded:
            unit.allocate()
        self._ledger.add(ByteClass.FULL, together.full_bytes)
        try:
            self._copy_out(flight)
        except BaseException:
            for unit in together.sharded:
                unit.free()
            self._ledger.add(ByteClass.FULL, -together.full_bytes)
            raise
        self._ledger.add_live(together.live)
        self.complete.update(together.units)
        self._drop(flight)

    def _copy_out(self, flight: _InFlight) -> None:
        in_turn, head = flight.together.in_turn, self._head
        with _labelled("copy_out", flight.together.names):
            for rows, first, end in self._comm.own_row(flight.shard):  # beside what still travels
                in_turn.copy_out(rows, first, end)
            flight.work.wait()
            for rows, first, end in self._comm.rows_of_others(flight.buffer):
                in_turn.copy_out(rows[..., head:] if head else rows, first, end)

    def _drop(self, flight: _InFlight, reuse: bool = True) -> None:
        for unit in flight.together.units:
            del self.in_flight[unit]
        self._ledger.add(ByteClass.FULL, -flight.nbytes)
        self._ledger.add_live(-flight.together.live)
        (self._pool.give if reuse else self._pool.lose)(flight.buffer)


def _labelled(what: str, units: Iterable[str]) -> AbstractContextManager[object]:
    """A label for torch's profiler, while it is on."""
    if not is_profiled():
        return nullcontext()
    return torch.profiler.record_function(f"zerotune::{what}({', '.join(units)})")

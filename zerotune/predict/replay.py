"""A schedule replayed against two clocks and two counters: compute, the link, live elements, and what has memory.

Compute goes from event to event in the seconds that were measured. The link carries one collective after the other, in
the order of issue; an action that waits holds compute up until the link has got so far. Where communication takes
processor time from compute, its seconds are added to compute when it is issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zerotune.records import Profile
from zerotune.schedule import Action, Collect, Drain, Gather, Layout, Reduce, Release, Schedule, Wait


@dataclass
class EventLoad:
    """What the actions of one event do.

    Attributes:
        collectives: Issued there.
        sent_bytes: Bytes that a rank sends of them.
        handled_bytes: Bytes copied out of gather buffers, into reduce buckets where there are any, and summed.
        acting_live: Largest number of live elements meanwhile, padded, gather buffers included.
        live: Live elements afterwards.
        acting_held: Largest number of elements meanwhile that full parameters and gather buffers have memory for: a unit
            under way takes less than a complete one where a rank sends itself nothing.
        held: The same afterwards.
    """

    collectives: int = 0
    sent_bytes: float = 0.0
    handled_bytes: float = 0.0
    acting_live: int = 0
    live: int = 0
    acting_held: int = 0
    held: int = 0


@dataclass(frozen=True)
class Replay:
    """What following a schedule takes.

    Attributes:
        seconds: From the first event until everything that the pass issued has landed.
        exposed_s: Of these, what compute stood still for communication.
        peak_live: Largest number of live elements.
        loads: For each event, and for the end of the pass.
    """

    seconds: float
    exposed_s: float
    peak_live: int
    loads: tuple[EventLoad, ...]


def replay(schedule: Schedule, layout: Layout, compute_s: Sequence[float], profile: Profile) -> Replay:
    """Predict one pass.

    Args:
        schedule: What it follows.
        layout: The sizes the schedule was compiled for.
        compute_s: For each event of its trace, seconds of compute from its actions to the next event.
        profile: What communication costs, of which size elements are, and whether it overlaps.
    """
    assert len(compute_s) == len(schedule.actions), "one number for every event"
    clocks = _Clocks(schedule, layout, profile)
    for index, seconds in enumerate(compute_s):
        # The opening counts with the first event, though the step before may have hidden some of it: all plans alike.
        opening = schedule.opening if index == 0 else ()
        clocks.act((*opening, *schedule.actions[index]))
        clocks.now += seconds
    clocks.act(schedule.at_end)
    clocks.finish()
    peak = max(load.acting_live for load in clocks.loads)
    return Replay(clocks.now, clocks.exposed_s, peak, tuple(clocks.loads))


@dataclass
class _Clocks:
    schedule: Schedule
    layout: Layout
    profile: Profile
    now: float = 0.0  # the clock of compute
    link_free: float = 0.0  # when the link has carried all that was issued
    exposed_s: float = 0.0
    live: int = 0
    held: int = 0
    loads: list[EventLoad] = field(default_factory=list)
    gathers: dict[int, tuple[tuple[int, ...], float]] = field(
        default_factory=dict
    )  # unit -> its gather, landing
    reductions: deque[tuple[int, float]] = field(default_factory=deque)  # bucket, landing

    def act(self, actions: Iterable[Action]) -> None:
        """Carry out what the schedule says of one event."""
        self.load = EventLoad(acting_live=self.live, acting_held=self.held)
        self.loads.append(self.load)
        for action in actions:
            match action:
                case Gather(units=units):
                    self._gather(units)
                case Wait(units=units):
                    for unit in units:
                        self._land(unit)
                case Release(units=units):
                    self._add(-self._elements(units))
                case Collect(params=params) if self.profile.copies_gradients:
                    self._handle(sum(map(self.layout.param_padded, params)) * self.profile.reduce_itemsize)
                case Reduce(bucket=bucket):
                    self.reductions.append((bucket, self._issue(self._travelling_bytes(bucket))))
                case Drain(keep=keep):
                    self._drain(keep)
        self.load.live, self.load.held = self.live, self.held

    def finish(self) -> None:
        """Wait for all that is under way."""
        self._drain(0)
        self._stand_until(self.link_free)

    def _gather(self, units: tuple[int, ...]) -> None:
        elements = self._elements(units)
        landing = self._issue(elements * self.profile.gather_itemsize)
        self._add(elements, self._in_buffers(units))
        for unit in units:
            self.gathers[unit] = (units, landing)

    def _land(self, unit: int) -> None:
        if unit not in self.gathers:
            return
        units, landing = self.gathers[unit]
        self._stand_until(landing)
        elements = self._elements(units)
        self._add(elements)  # the storages, beside the buffers, which go then
        self._add(-elements, -self._in_buffers(units))
        self._handle(elements * self.profile.gather_itemsize)
        for member in units:
            del self.gathers[member]

    def _elements(self, units: Iterable[int]) -> int:
        return sum(self.layout.padded(unit) for unit in units)

    def _in_buffers(self, units: Sequence[int]) -> int:
        """Elements that the buffers of one gather have room for: the rows it brings, and where it is of several units their
        slices in a row."""
        rows = self.layout.ranks if self.profile.gathered_rows is None else self.profile.gathered_rows
        return self._elements(units) // self.layout.ranks * (rows + (len(units) > 1))

    def _add(self, live: int, held: int | None = None) -> None:
        self.live += live
        self.held += live if held is None else held
        self.load.acting_live = max(self.load.acting_live, self.live)
        self.load.acting_held = max(self.load.acting_held, self.held)

    def _drain(self, keep: int) -> None:
        while len(self.reductions) > keep:
            bucket, landing = self.reductions.popleft()
            self._stand_until(landing)
            self._handle(self._bucket_bytes(bucket))

    def _bucket_bytes(self, bucket: int) -> int:
        params = self.schedule.buckets[bucket].params
        return sum(map(self.layout.param_padded, params)) * self.profile.reduce_itemsize

    def _travelling_bytes(self, bucket: int) -> float:
        left_out = self.profile.left_out
        if not left_out:
            return self._bucket_bytes(bucket)
        params = self.schedule.buckets[bucket].params
        travelling = sum(self.layout.param_padded(ref) * (1.0 - left_out[ref.unit]) for ref in params)
        return travelling * self.profile.reduce_itemsize

    def _issue(self, full_bytes: float) -> float:
        """Put a collective of so many bytes, full and padded, on the link; returns when it lands."""
        link, ranks = self.profile.link, self.layout.ranks
        sent = full_bytes * (ranks - 1) / ranks
        self.load.collectives += 1
        self.load.sent_bytes += sent
        if ranks > 1:
            begin = max(self.now, self.link_free)
            self.link_free = begin + link.latency_s + sent * link.seconds_per_byte
        landing = self.link_free if ranks > 1 else self.now
        if self.profile.overlaps:
            self.now += sent * link.stolen_s_per_byte
        else:
            self._stand_until(landing)
        return landing

    def _stand_until(self, landing: float) -> None:
        if landing > self.now:
            self.exposed_s += landing - self.now
            self.now = landing

    def _handle(self, nbytes: float) -> None:
        self.load.handled_bytes += nbytes
        self.now += nbytes * self.profile.link.handled_s_per_byte

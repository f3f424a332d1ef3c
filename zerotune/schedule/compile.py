"""Trace and knobs in, schedule out: the one place that decides when data moves.

The rules, in the order in which they give way to each other:

1. A unit is complete before the first event that uses it (*demand*), whatever the bounds say.
2. Live elements stay within ``max_live_parameters``: prefetches that do not fit wait, and units that are only kept
   for a later use go, the one whose next use is farthest first.
3. Elements ahead of use stay within ``prefetch_distance``, from where backward begins within
   ``backward_prefetch_distance``; at a distance above 0 one larger unit may go.
4. Consecutive gathers that are admitted at the same event share a collective, up to ``allgather_bucket_size``.

Gathers are issued in the order of use, so the order of collectives is a function of the trace and the knobs alone.
"""

from __future__ import annotations

import gc
import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from zerotune.config.knobs import Knobs
from zerotune.schedule.actions import Action, Gather, Reason, Release, Wait
from zerotune.schedule.buckets import Bucket
from zerotune.schedule.layout import Layout
from zerotune.schedule.plan import ReleasePlan
from zerotune.schedule.reductions import place_reductions
from zerotune.schedule.schedule import Saving, SavingReason, Schedule
from zerotune.schedule.trace import EventKind, Phase, Trace


@dataclass(slots=True)
class _Need:
    """One entry event's need of one unit's weights.

    ``kept_from_before``: the unit stays live from its previous use, so no gather is needed. ``free_after``: index of
    the event at which the previous use's copy is dropped; a gather may not be issued before it.
    """

    event: int
    unit: int
    kept_from_before: bool = False
    free_after: int = -1
    is_first: bool = True


@dataclass(slots=True)
class _State:
    live: int = 0
    promised: int = 0  # storage that gathers in flight will take when they are copied out
    ahead: int = 0
    peak_live: int = 0
    peak_ahead: int = 0
    bucket_of: dict[int, tuple[int, ...]] = field(default_factory=dict)  # unit in flight -> its gather
    complete: set[int] = field(default_factory=set)
    unused: set[int] = field(default_factory=set)  # gathered ahead, not used since
    open_uses: dict[int, int] = field(default_factory=dict)


def compile_schedule(
    trace: Trace, knobs: Knobs, layout: Layout, reduces: bool = True, plan: ReleasePlan | None = None
) -> Schedule:
    """Compile the schedule of one pass.

    Args:
        trace: Events of the pass.
        knobs: Resolved knobs (no ``auto``).
        layout: The model's units over N ranks.
        reduces: Whether the pass reduces its gradients; otherwise they are left to accumulate where they are.
        plan: What to keep, unit by unit, in place of what ``knobs.release`` says of all.

    Returns:
        A schedule that obeys the invariants of the design, the same on every rank.

    Raises:
        ValueError: The knobs still hold ``auto``, or an exit has no entry.
    """
    if not knobs.is_resolved:
        raise ValueError("knobs must be resolved before a schedule is compiled")
    plan = plan or ReleasePlan.of_knobs(knobs, len(layout.units))
    with _not_collecting():
        return _Compiler(trace, knobs, layout, plan).compile(reduces)


@contextmanager
def _not_collecting() -> Iterator[None]:
    """Python's collector stands still: all that is made here is kept, and looking through it takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Compiler:
    def __init__(self, trace: Trace, knobs: Knobs, layout: Layout, plan: ReleasePlan) -> None:
        self.trace = trace
        self.knobs = knobs
        self.layout = layout
        self.plan = plan
        self.persistent = layout.persistent_units
        self.numel = [layout.numel(unit) for unit in range(len(layout.units))]
        self.padded = [layout.padded(unit) for unit in range(len(layout.units))]
        self.needs: list[_Need] = []
        self.needs_at: list[range] = []  # per event, indices into needs
        self.need_events: dict[int, list[int]] = {}  # unit -> events that need it, ascending
        self.need_index: dict[tuple[int, int], int] = {}
        self.opening: list[Action] = []
        self.numel_before: list[int] = [0]  # elements of all needs before each
        self.savings: list[Saving | None] = []  # ``None`` where one was taken back
        self.kept_savings: dict[int, list[int]] = {}  # unit -> where in savings it is kept, ascending
        self.actions: list[list[Action]] = [[] for _ in trace.events]
        self.drops: list[list[int]] = [[] for _ in trace.events]  # units dropped at each exit, by policy

    def compile(self, reduces: bool) -> Schedule:
        self._find_needs()
        self._decide_drops()
        self._place_gathers()
        at_end: list[Action] = []
        buckets: tuple[Bucket, ...] = ()
        if reduces and self.trace.has_backward:
            at_end, buckets = place_reductions(self.actions, self.trace, self.knobs, self.layout)
        return Schedule(
            trace=self.trace,
            opening=tuple(a for a in self.opening if isinstance(a, Gather)),
            actions=tuple(tuple(step) for step in self.actions),
            at_end=tuple(at_end),
            buckets=buckets,
            savings=tuple(saving for saving in self.savings if saving is not None),
            peak_live=self.state.peak_live,
            peak_ahead=self.state.peak_ahead,
        )

    # ------------------------------------------------------------------------------------------ static part

    def _find_needs(self) -> None:
        for index, event in enumerate(self.trace.events):
            start = len(self.needs)
            if event.kind is EventKind.ENTER:
                for unit in self.layout.needed(event.units, event.phase is Phase.BACKWARD):
                    self.need_index[index, unit] = len(self.needs)
                    events = self.need_events.setdefault(unit, [])
                    self.needs.append(_Need(index, unit, is_first=not events))
                    self.numel_before.append(self.numel_before[-1] + self.numel[unit])
                    events.append(index)
                if event.phase is Phase.BACKWARD:
                    for unit in event.units:
                        if unit not in self.persistent and not self.layout.units[unit].backward_needs_weights:
                            self._save(unit, SavingReason.NO_WEIGHTS_IN_BACKWARD)
            self.needs_at.append(range(start, len(self.needs)))

    def _save(self, unit: int, reason: str) -> None:
        if reason != SavingReason.NO_WEIGHTS_IN_BACKWARD:
            self.kept_savings.setdefault(unit, []).append(len(self.savings))
        self.savings.append(Saving(unit, reason, self.padded[unit]))

    def _padded(self, units: Sequence[int]) -> int:
        return self.padded[units[0]] if len(units) == 1 else sum(self.padded[unit] for unit in units)

    def _next_need(self, unit: int, after: int) -> int | None:
        events = self.need_events.get(unit, [])
        position = bisect_right(events, after)
        return events[position] if position < len(events) else None

    def _decide_drops(self) -> None:
        """At each exit that closes a unit's last open use, decide whether the policy drops or keeps it."""
        open_uses: dict[int, int] = {}
        held: set[int] = set()  # used at least once and not dropped since
        for index, event in enumerate(self.trace.events):
            if event.kind is EventKind.ENTER:
                for unit in event.units:
                    if unit in self.persistent:
                        continue
                    need = self.need_index.get((index, unit))
                    if need is not None and open_uses.get(unit, 0) and unit in held:
                        # Nested in another use of the same unit that already made it complete.
                        self.needs[need].kept_from_before = True
                    if need is not None:
                        held.add(unit)
                    open_uses[unit] = open_uses.get(unit, 0) + 1
                continue
            for unit in event.units:
                if unit in self.persistent:
                    continue
                if open_uses.get(unit, 0) == 0:
                    raise ValueError(f"{event.scope}: exit without entry")
                open_uses[unit] -= 1
                if open_uses[unit] or unit not in held:
                    continue
                following = self._next_need(unit, index)
                reason = (
                    None
                    if following is None
                    else self._reason_to_keep(unit, index, following, open_uses, held)
                )
                if reason is None:
                    held.discard(unit)
                    self.drops[index].append(unit)
                    if following is not None:
                        self.needs[self.need_index[following, unit]].free_after = index
                else:
                    assert following is not None
                    self.needs[self.need_index[following, unit]].kept_from_before = True
                    self._save(unit, reason)

    def _reason_to_keep(
        self, unit: int, index: int, following: int, open_uses: dict[int, int], held: set[int]
    ) -> str | None:
        if self._nothing_gathered_between(unit, index, following, open_uses, held):
            return SavingReason.USED_NEXT
        if unit in self.plan.kept:
            return SavingReason.KEPT
        if self.plan.reuse_distance is not None:
            begin, end = self.needs_at[index].stop, self.needs_at[following].start
            if self.numel_before[end] - self.numel_before[begin] <= self.plan.reuse_distance:
                return SavingReason.KEPT
        return None

    def _nothing_gathered_between(
        self, unit: int, index: int, following: int, open_uses: dict[int, int], held: set[int]
    ) -> bool:
        """Whether dropping would only be undone: every need until the next use is of a unit that is open now."""
        for need in range(self.needs_at[index].stop, self.needs_at[following].start):
            other = self.needs[need].unit
            if not (open_uses.get(other, 0) and other in held):
                return False
        return True

    # ----------------------------------------------------------------------------------------- dynamic part

    def _place_gathers(self) -> None:
        self.state = _State()
        self.cursor = 0  # first need that has neither been issued nor found to be kept
        self.kept: dict[int, int] = {}  # unit that is only kept -> event of its next use
        self.leaving: set[int] = set()  # dropped at this event, unless a prefetch would bring it back at once
        self.farthest: list[tuple[int, int]] = []  # heap of (-event, unit), with some that are kept no more
        self._prefetch(-1, self.opening)
        for index, event in enumerate(self.trace.events):
            if event.kind is EventKind.ENTER:
                self._enter(index, event.units, event.phase)
            else:
                self._exit(index, event.units)

    def _enter(self, index: int, units: Sequence[int], phase: Phase) -> None:
        state = self.state
        step = self.actions[index]
        needed = [self.needs[n].unit for n in self.needs_at[index]]
        for unit in needed:
            self.kept.pop(unit, None)
        missing = tuple(u for u in needed if u not in state.complete and u not in state.bucket_of)
        for unit in units:
            if unit not in self.persistent:
                state.open_uses[unit] = state.open_uses.get(unit, 0) + 1
        if missing:
            size = 2 * self._padded(missing)
            self._make_room(size, until=None, step=step)
            for bucket in self._split(missing):
                self._issue(bucket, Reason.DEMAND, phase, step)
        for unit in needed:
            if unit in state.unused:
                state.unused.discard(unit)
                state.ahead -= self.numel[unit]
        self.cursor = max(self.cursor, self.needs_at[index].stop)
        self._prefetch(index, step)
        waited = tuple(u for u in needed if u in state.bucket_of)
        if waited:
            step.append(Wait(waited))
            for unit in waited:
                self._copy_out(unit)

    def _split(self, units: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Units needed at once, in collectives of at most the bucket size (a larger unit goes alone)."""
        limit = int(self.knobs.allgather_bucket_size)
        buckets: list[list[int]] = []
        size = 0
        for unit in units:
            numel = self.numel[unit]
            if buckets and size + numel <= limit:
                buckets[-1].append(unit)
                size += numel
            else:
                buckets.append([unit])
                size = numel
        return [tuple(bucket) for bucket in buckets]

    def _exit(self, index: int, units: Sequence[int]) -> None:
        state = self.state
        step = self.actions[index]
        for unit in units:
            if unit not in self.persistent:
                state.open_uses[unit] -= 1
        dropped = [u for u in self.drops[index] if u in state.complete]
        self._forget(dropped)
        self.leaving.update(dropped)
        place = len(step)
        for unit in units:
            if unit in state.complete and not state.open_uses.get(unit) and unit not in state.unused:
                following = self._next_need(unit, index)
                if following is not None and self.kept.get(unit) != following:
                    self.kept[unit] = following
                    heapq.heappush(self.farthest, (-following, unit))
        self._make_room(
            0, until=None, step=step
        )  # what the open units were allowed beyond the bound ends here
        self._prefetch(index, step)
        released = tuple(unit for unit in dropped if unit in self.leaving)
        if released:
            step.insert(place, Release(released))
        self.leaving.clear()

    def _drop(self, units: Sequence[int], step: list[Action]) -> None:
        step.append(Release(tuple(units)))
        self._forget(units)

    def _forget(self, units: Sequence[int]) -> None:
        for unit in units:
            self.state.complete.discard(unit)
            self.kept.pop(unit, None)
            self.state.live -= self.padded[unit]

    def _stays(self, need: _Need, distance: int) -> bool:
        """Do not drop a unit whose gather would be issued at this very event: the copy that leaves is the one that it
        would bring. It counts as ahead of use from here on, as that gather would."""
        state = self.state
        numel, padded = self.numel[need.unit], self.padded[need.unit]
        if state.ahead and state.ahead + numel > distance:
            return False
        if not self._make_room(padded, until=need.event, step=self.actions[need.free_after]):
            return False
        self.leaving.discard(need.unit)
        need.kept_from_before = True
        self._save(need.unit, SavingReason.WITHIN_DISTANCE)
        state.complete.add(need.unit)
        state.unused.add(need.unit)
        state.live += padded
        state.peak_live = max(state.peak_live, state.live)
        state.ahead += numel
        state.peak_ahead = max(state.peak_ahead, state.ahead)
        return True

    def _issue(self, units: tuple[int, ...], reason: Reason, phase: Phase, step: list[Action]) -> None:
        state = self.state
        step.append(Gather(units, reason, phase.value))
        size = self._padded(units)
        state.live += size
        state.promised += size
        state.peak_live = max(state.peak_live, state.live)
        for unit in units:
            state.bucket_of[unit] = units

    def _copy_out(self, unit: int) -> None:
        """A gather lands: its storages are allocated and filled, then its buffer goes."""
        state = self.state
        if unit not in state.bucket_of:
            return
        units = state.bucket_of[unit]
        size = self._padded(units)
        state.peak_live = max(state.peak_live, state.live + size)
        state.promised -= size
        for member in units:
            del state.bucket_of[member]
            state.complete.add(member)

    def _make_room(self, size: int, until: int | None, step: list[Action]) -> bool:
        """Drop kept units, farthest next use first, until ``size`` more live elements fit.

        Args:
            size: Elements wanted.
            until: Only units whose next use comes after this event may go; ``None`` for any.
            step: Where the releases are put.

        Returns:
            Whether it fits. If not, nothing is dropped unless ``until`` is ``None`` (a demand, which goes anyway).
        """
        limit = self.knobs.max_live_parameters
        if limit is None:
            return True
        state = self.state
        excess = state.live + state.promised + size - limit
        if excess <= 0:
            return True
        victims: dict[int, int] = {}  # unit -> event of its next use
        while excess > 0 and self.farthest:
            event, unit = -self.farthest[0][0], self.farthest[0][1]
            if self.kept.get(unit) == event and unit not in victims:
                if until is not None and event <= until:
                    break
                victims[unit] = event
                excess -= self.padded[unit]
            heapq.heappop(self.farthest)
        fits = excess <= 0
        if victims and (fits or until is None):
            for unit, event in victims.items():
                need = self.need_index[event, unit]
                self.needs[need].kept_from_before = False
                self.needs[need].free_after = -1
                self.cursor = min(self.cursor, need)
                self._unsave(unit)
            self._drop(tuple(victims), step)
        else:
            for unit, event in victims.items():
                heapq.heappush(self.farthest, (-event, unit))
        return fits

    def _unsave(self, unit: int) -> None:
        positions = self.kept_savings.get(unit)
        if positions:
            self.savings[positions.pop()] = None

    def _prefetch(self, index: int, step: list[Action]) -> None:
        """Issue the next gathers ahead of use, in the order of use, as far as the bounds admit."""
        distance = self._distance(index)
        if distance == 0 or self.cursor == len(self.needs):
            return
        while True:
            bucket = self._next_bucket(index, distance)
            if not bucket:
                return
            units = tuple(self.needs[n].unit for n in bucket)
            last = self.needs[bucket[-1]].event
            size = 2 * self._padded(units)
            if not self._make_room(size, until=last, step=step):
                if len(bucket) == 1:
                    return
                bucket = bucket[:1]
                units = units[:1]
                size = 2 * self.padded[units[0]]
                if not self._make_room(size, until=self.needs[bucket[0]].event, step=step):
                    return
            state = self.state
            self._issue(units, Reason.PREFETCH, self.trace.events[self.needs[bucket[0]].event].phase, step)
            state.unused.update(units)
            state.ahead += sum(self.numel[unit] for unit in units)
            state.peak_ahead = max(state.peak_ahead, state.ahead)
            self.cursor = bucket[-1] + 1

    def _distance(self, index: int) -> int:
        """Elements that may be ahead of use after an event (-1: before the first)."""
        is_forward = index < 0 or self.trace.events[index].phase is Phase.FORWARD
        return int(self.knobs.prefetch_distance if is_forward else self.knobs.backward_prefetch_distance)

    def _next_bucket(self, index: int, distance: int) -> list[int]:
        """Needs that the next prefetch would carry; empty if nothing may be issued now."""
        state = self.state
        limit = int(self.knobs.allgather_bucket_size)
        bucket: list[int] = []
        size = 0
        chosen: set[int] = set()
        position = self.cursor
        while position < len(self.needs):
            need = self.needs[position]
            if need.event <= index or (need.kept_from_before and need.unit not in chosen):
                if not bucket:
                    self.cursor = position + 1
                position += 1
                continue
            if need.kept_from_before:
                position += 1
                continue
            if need.free_after > index or need.unit in chosen or need.unit in state.complete:
                break  # its previous copy is still in use: gathering it now would be undone
            if need.unit in self.leaving:
                if bucket or not self._stays(need, distance):
                    break
                continue
            if need.unit in state.bucket_of:
                break
            numel = self.numel[need.unit]
            if bucket and size + numel > limit:
                break
            bucket.append(position)
            chosen.add(need.unit)
            size += numel
            position += 1
            if state.ahead + size > distance:
                break  # more of them would change nothing below
        if not bucket or state.ahead + size <= distance:
            return bucket
        if state.ahead:
            return []
        # Nothing is ahead: issue what fits, or one larger unit, so that communication always has a head start.
        while len(bucket) > 1 and size > distance:
            size -= self.numel[self.needs[bucket.pop()].unit]
        return bucket

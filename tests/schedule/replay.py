"""An independent reading of a schedule: does what it says, and checks the design's invariants at every event."""

from __future__ import annotations

from dataclasses import dataclass, field

from zerotune.config.knobs import Knobs
from zerotune.schedule import (
    Collect,
    Drain,
    EventKind,
    Gather,
    Layout,
    ParamRef,
    Phase,
    Reason,
    Reduce,
    Release,
    Schedule,
    Wait,
)


@dataclass
class Replay:
    """What following a schedule did.

    Attributes:
        gathered: Padded elements gathered.
        reduced: Padded elements reduced.
        peak_live: Largest number of live elements.
        peak_ahead: Largest number of elements ahead of use.
        reductions: For each parameter, how often its gradient was reduced.
    """

    gathered: int = 0
    reduced: int = 0
    peak_live: int = 0
    peak_ahead: int = 0
    reductions: dict[ParamRef, int] = field(default_factory=dict)


def replay(schedule: Schedule, layout: Layout, knobs: Knobs) -> Replay:
    """Follow a schedule, asserting what must always hold."""
    result = Replay()
    complete: set[int] = set()
    in_flight: dict[int, tuple[int, ...]] = {}
    open_uses: dict[int, int] = {}
    unused: set[int] = set()
    live = 0
    last_backward_use: dict[int, int] = {}
    for index, event in enumerate(schedule.trace.events):
        if event.kind is EventKind.EXIT and event.phase is Phase.BACKWARD:
            for unit in event.units:
                last_backward_use[unit] = index
    collected: dict[int, set[ParamRef]] = {}
    filling: list[int] = []
    reducing: list[int] = []

    def needs(units: tuple[int, ...], phase: Phase) -> list[int]:
        return [
            u
            for u in units
            if layout.padded(u) and (phase is Phase.FORWARD or layout.units[u].backward_needs_weights)
        ]

    def check_live(forced: int) -> None:
        result.peak_live = max(result.peak_live, live)
        if knobs.max_live_parameters is not None:
            assert live <= max(knobs.max_live_parameters, forced), "live elements above the bound"

    steps = [schedule.opening, *schedule.actions, schedule.at_end]
    for index, step in enumerate(steps, start=-1):
        event = schedule.trace.events[index] if 0 <= index < len(schedule.trace.events) else None
        needed = needs(event.units, event.phase) if event and event.kind is EventKind.ENTER else []
        if event and event.kind is EventKind.EXIT:
            for unit in event.units:
                open_uses[unit] -= 1
        # Units open at this event, each with its gather buffer, are the exception to the bound.
        open_now = {u for u in open_uses if open_uses[u] and u in complete} | set(needed)
        forced = 2 * sum(layout.padded(u) for u in open_now)
        for action in step:
            match action:
                case Gather(units=units, reason=reason):
                    for unit in units:
                        assert unit not in complete and unit not in in_flight, "gathered twice"
                        in_flight[unit] = units
                        result.gathered += layout.padded(unit)
                        live += layout.padded(unit)
                    total = sum(layout.numel(u) for u in units)
                    if len(units) > 1:
                        assert total <= knobs.allgather_bucket_size, "a merged gather above the bucket size"
                    if reason is Reason.PREFETCH:
                        unused.update(units)
                        ahead = sum(layout.numel(u) for u in unused - set(needed))
                        result.peak_ahead = max(result.peak_ahead, ahead)
                        is_forward = event is None or event.phase is Phase.FORWARD
                        distance = knobs.prefetch_distance if is_forward else knobs.backward_prefetch_distance
                        assert distance > 0
                        if len(unused - set(needed)) > 1:
                            assert ahead <= distance, "ahead of use beyond the distance"
                    check_live(forced)
                case Wait(units=units):
                    for unit in units:
                        if unit in in_flight:
                            members = in_flight[unit]
                            size = sum(layout.padded(u) for u in members)
                            live += size
                            check_live(forced)
                            live -= size
                            for member in members:
                                del in_flight[member]
                                complete.add(member)
                case Release(units=units):
                    for unit in units:
                        assert unit in complete, "released what is not complete"
                        assert not open_uses.get(unit), "released while in use"
                        complete.discard(unit)
                        live -= layout.padded(unit)
                case Collect(bucket=bucket, params=params):
                    if bucket not in filling:
                        filling.append(bucket)
                    alive = [
                        sum(layout.param(ref).numel for ref in schedule.buckets[b].params)
                        for b in (*filling, *reducing)
                    ]
                    assert (
                        len(alive) <= 2
                        or sum(alive) <= 2 * knobs.reduce_bucket_size + layout.largest_parameter
                    ), "more than two reduce buckets and the largest parameter alive"
                    for ref in params:
                        assert ref in schedule.buckets[bucket].params
                        assert layout.param(ref).trainable
                        assert index >= last_backward_use.get(ref.unit, index), "reduced before its last use"
                        collected.setdefault(bucket, set()).add(ref)
                        result.reductions[ref] = result.reductions.get(ref, 0) + 1
                case Reduce(bucket=bucket):
                    assert collected[bucket] == set(schedule.buckets[bucket].params), (
                        "reduced before it was full"
                    )
                    members = schedule.buckets[bucket].params
                    if len(members) > 1:
                        assert sum(layout.param(r).numel for r in members) <= knobs.reduce_bucket_size
                    result.reduced += sum(layout.param_padded(r) for r in members)
                    filling.remove(bucket)
                    reducing.append(bucket)
                case Drain(keep=keep):
                    while len(reducing) > keep:
                        reducing.pop(0)
        if event and event.kind is EventKind.ENTER:
            for unit in needed:
                assert unit in complete, f"{unit} is not complete at its use"
            unused.difference_update(needed)
            for unit in event.units:
                open_uses[unit] = open_uses.get(unit, 0) + 1
        check_live(forced)
    assert not complete and not in_flight and live == 0, "something is live after the pass"
    assert not filling, "a bucket was filled but not reduced"
    return result

"""Where a pass with backward reduces its gradients, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence

from zerotune.config.knobs import Knobs
from zerotune.schedule.actions import Action, Collect, Drain, Reduce
from zerotune.schedule.buckets import Bucket, fill_buckets
from zerotune.schedule.layout import Layout, ParamRef
from zerotune.schedule.trace import EventKind, Phase, Trace


def place_reductions(
    actions: Sequence[list[Action]], trace: Trace, knobs: Knobs, layout: Layout
) -> tuple[list[Action], tuple[Bucket, ...]]:
    """Reduce every gradient after its last use.

    Args:
        actions: What is done at each event; reductions are appended to it.
        trace: The events.
        knobs: Resolved knobs.
        layout: The model's units over N ranks.

    Returns:
        What is left to be done at the end of backward, and the buckets.
    """
    last_use: dict[int, int] = {}
    for index, event in enumerate(trace.events):
        if event.kind is EventKind.EXIT and event.phase is Phase.BACKWARD:
            for unit in event.units:
                last_use[unit] = index
    end = len(trace.events)
    ready: dict[int, list[ParamRef]] = {}
    for ref in layout.refs():
        if layout.param(ref).trainable:
            ready.setdefault(last_use.get(ref.unit, end), []).append(ref)
    at_end: list[Action] = []
    order = sorted(ready)
    limit = int(knobs.reduce_bucket_size)
    buckets, members = fill_buckets([ready[i] for i in order], layout, limit)
    started: set[int] = set()
    bound = 2 * limit + layout.largest_parameter
    sizes = [sum(layout.param(ref).numel for ref in bucket.params) for bucket in buckets]
    for index, groups in zip(order, members, strict=True):
        step = actions[index] if index < end else at_end
        for bucket, refs, is_full in groups:
            if bucket not in started:
                started.add(bucket)
                step.append(Drain(keep=_room_for(bucket, sizes, bound)))
            step.append(Collect(bucket, refs))
            if is_full:
                step.append(Reduce(bucket))
    return at_end, buckets


def _room_for(bucket: int, sizes: Sequence[int], bound: int) -> int:
    """How many of the buckets before one may still be under way when it is begun.

    Args:
        bucket: Its index.
        sizes: Elements of every bucket.
        bound: Elements of all that are alive, at most; one may always be under way.
    """
    alive = sizes[bucket]
    for count, size in enumerate(reversed(sizes[:bucket])):
        alive += size
        if alive > bound:
            return max(1, count)
    return max(1, bucket)

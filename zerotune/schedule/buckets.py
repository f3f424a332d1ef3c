"""Which gradients share a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from zerotune.schedule.layout import Layout, ParamRef


@dataclass(frozen=True)
class Bucket:
    """Gradients reduced in one collective.

    Attributes:
        params: Its members; slice r of each is sent to rank r, in this order.
    """

    params: tuple[ParamRef, ...]


Placement = tuple[int, tuple[ParamRef, ...], bool]
"""A bucket's index, the members that go into it now, and whether it is complete with them."""


def fill_buckets(
    ready: Sequence[Sequence[ParamRef]], layout: Layout, limit: int
) -> tuple[tuple[Bucket, ...], list[list[Placement]]]:
    """Put gradients into buckets in the order in which they become complete.

    A group that does not fit into what is left of a bucket, but would fit into an empty one, begins a new one: half of
    it would otherwise wait for the next group before it could travel.

    Args:
        ready: Groups of parameters that become complete together, in order.
        layout: The model's sizes.
        limit: Elements per bucket, without padding; a larger parameter goes alone.

    Returns:
        The buckets, and for each group what goes where. The last bucket is complete with the last group.
    """
    buckets: list[list[ParamRef]] = []
    size = 0
    where: list[list[tuple[int, ParamRef]]] = []
    for group in ready:
        placed = []
        whole = sum(layout.param(ref).numel for ref in group)
        if buckets and size + whole > limit >= whole > 0:
            buckets.append([])
            size = 0
        for ref in group:
            numel = layout.param(ref).numel
            if not buckets or size + numel > limit:
                buckets.append([])
                size = 0
            buckets[-1].append(ref)
            size += numel
            placed.append((len(buckets) - 1, ref))
        where.append(placed)

    left = [len(bucket) for bucket in buckets]
    placements: list[list[Placement]] = []
    for placed in where:
        groups: list[Placement] = []
        for bucket, members in groupby(placed, key=itemgetter(0)):  # in ascending order
            refs = tuple(ref for _, ref in members)
            left[bucket] -= len(refs)
            groups.append((bucket, refs, left[bucket] == 0))
        placements.append(groups)
    return tuple(Bucket(tuple(bucket)) for bucket in buckets), placements

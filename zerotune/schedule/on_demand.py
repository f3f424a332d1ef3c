"""The policy for everything that no schedule covers: the first pass, and a pass that leaves the recorded order.

It gathers what an event needs and does not have, drops it after use, and reduces all gradients at the end. It costs
time, never correctness.
"""

from __future__ import annotations

from collections.abc import Collection

from zerotune.config.knobs import Knobs
from zerotune.schedule.actions import Action, Collect, Drain, Gather, Reason, Reduce, Release, Wait
from zerotune.schedule.buckets import Bucket, fill_buckets
from zerotune.schedule.layout import Layout, ParamRef
from zerotune.schedule.trace import Event, Phase

_REMEMBERED = 8
"""Sets of parameters whose reductions are remembered: at stage 1 it is the same one in every step."""


class OnDemand:
    """Actions from what is there now, without a recorded order.

    Args:
        knobs: Resolved knobs.
        layout: The model's units over N ranks.
    """

    def __init__(self, knobs: Knobs, layout: Layout) -> None:
        self._knobs = knobs
        self._layout = layout
        self._reductions: dict[tuple[ParamRef, ...], tuple[tuple[Bucket, ...], list[Action]]] = {}

    def before(self, event: Event, complete: Collection[int], in_flight: Collection[int]) -> list[Action]:
        """What an entry needs: gather the absent units, one collective each, and wait for all of them."""
        needed = self.needed(event)
        actions: list[Action] = [
            Gather((unit,), Reason.DEMAND, event.phase.value)
            for unit in needed
            if unit not in complete and unit not in in_flight
        ]
        waited = tuple(unit for unit in needed if unit not in complete)
        if waited:
            actions.append(Wait(waited))
        return actions

    def needed(self, event: Event) -> list[int]:
        """Units whose weights an entry reads."""
        return self._layout.needed(event.units, event.phase is Phase.BACKWARD)

    def after(self, event: Event, complete: Collection[int], open_uses: dict[int, int]) -> list[Action]:
        """Drop what the exit leaves unused."""
        dropped = tuple(unit for unit in event.units if unit in complete and not open_uses.get(unit))
        return [Release(dropped)] if dropped else []

    def reductions(self, params: Collection[ParamRef]) -> tuple[tuple[Bucket, ...], list[Action]]:
        """Reduce the gradients of ``params`` at the end of backward, in buckets of the same size as a schedule's."""
        key = tuple(params)
        if key in self._reductions:
            return self._reductions[key]
        limit = int(self._knobs.reduce_bucket_size)
        if self._layout.ranks == 1:  # nothing travels, and what is cut could not stay where it is
            limit = sum(self._layout.param(ref).numel for ref in params)
        buckets, placements = fill_buckets([list(params)], self._layout, limit)
        actions: list[Action] = []
        for bucket, refs, _ in placements[0]:
            actions += [Drain(keep=1), Collect(bucket, refs), Reduce(bucket)]
        if len(self._reductions) >= _REMEMBERED:
            self._reductions.clear()
        self._reductions[key] = buckets, actions
        return buckets, actions

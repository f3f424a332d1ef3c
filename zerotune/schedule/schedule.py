"""What to do at every event of one pass: what the compiler makes, the engine carries out and the predictor replays."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from zerotune.schedule.actions import Action, Gather, Reduce
from zerotune.schedule.buckets import Bucket
from zerotune.schedule.layout import Layout
from zerotune.schedule.trace import Trace


class SavingReason:
    """Why a plain model moves fewer elements than 3P (N-1)/N a step. Plain strings: they are shown as they are."""

    NO_WEIGHTS_IN_BACKWARD = "backward needs no weights"
    USED_NEXT = "used again before any other unit"
    KEPT = "kept for its next use"
    WITHIN_DISTANCE = "its next use is within the prefetch distance"


@dataclass(frozen=True)
class Saving:
    """A gather that did not have to happen.

    Attributes:
        unit: Index of the unit.
        reason: Why.
        elements: Elements of the full, padded unit.
    """

    unit: int
    reason: str
    elements: int


@dataclass(frozen=True)
class Schedule:
    """What to do at every event of one pass, and at its end.

    Attributes:
        trace: The order it was compiled from.
        opening: What may be gathered before the pass begins, as soon as its shards hold the values that it is to
            use: first thing in the pass, or while the optimizer still updates other shards.
        actions: For each event, what to do: before the use at an entry, after it at an exit.
        at_end: What to do once backward has returned.
        buckets: Reduce buckets, by index.
        savings: Gathers that did not have to happen.
        peak_live: Largest number of live elements that following it gives, padded, gather buffers included.
        peak_ahead: Largest number of elements ahead of use, without padding.
    """

    trace: Trace
    opening: tuple[Gather, ...]
    actions: tuple[tuple[Action, ...], ...]
    at_end: tuple[Action, ...]
    buckets: tuple[Bucket, ...]
    savings: tuple[Saving, ...]
    peak_live: int
    peak_ahead: int

    @cached_property
    def digest(self) -> str:
        """Hash of everything it does; ranks that disagree on it would disagree on their collectives."""
        hasher = hashlib.sha256(self.trace.digest.encode())
        hasher.update(repr((self.opening, self.actions, self.at_end, self.buckets)).encode())
        return hasher.hexdigest()

    def gathers(self) -> list[Gather]:
        """All gathers, in the order of issue."""
        steps = (self.opening, *self.actions, self.at_end)
        return [a for step in steps for a in step if isinstance(a, Gather)]

    def reductions(self) -> list[Bucket]:
        """All reduced buckets, in the order of issue."""
        steps = (*self.actions, self.at_end)
        return [self.buckets[a.bucket] for step in steps for a in step if isinstance(a, Reduce)]

    def gathered_elements(self, layout: Layout) -> int:
        """Padded elements of all units gathered in one pass; a rank receives (N-1)/N of them."""
        return sum(layout.padded(unit) for gather in self.gathers() for unit in gather.units)

    def reduced_elements(self, layout: Layout) -> int:
        """Padded elements of all gradients reduced in one pass; a rank sends (N-1)/N of them."""
        return sum(layout.param_padded(ref) for bucket in self.reductions() for ref in bucket.params)

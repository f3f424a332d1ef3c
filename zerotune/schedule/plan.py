"""What ``release: planned`` chose: for every unit whether it is released, kept until its next use, or persistent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from zerotune.config.knobs import Knobs
from zerotune.config.knobs import Release as ReleasePolicy
from zerotune.schedule.layout import Layout


class UnitChoice(StrEnum):
    """What becomes of a unit between two uses in one pass, and between passes."""

    RELEASE = "release"
    KEEP = "keep"
    PERSIST = "persist"


@dataclass(frozen=True)
class ReleasePlan:
    """A choice for every unit. Every global setting of ``release`` is one too (:meth:`of_knobs`).

    Attributes:
        kept: Units that are kept from one use to the next within a pass.
        persistent: Units that stay full between passes as well. A schedule takes them from its layout, see
            :meth:`layout`.
        reuse_distance: Units in neither set are kept where at most this many elements are used before their next
            use; ``None`` releases them after each use.
    """

    kept: frozenset[int] = frozenset()
    persistent: frozenset[int] = frozenset()
    reuse_distance: int | None = None

    @classmethod
    def of_knobs(cls, knobs: Knobs, units: int) -> ReleasePlan:
        """What the knobs choose, for all of so many units alike; ``planned`` begins with releasing all."""
        match knobs.release:
            case ReleasePolicy.KEEP:
                return cls(kept=frozenset(range(units)))
            case ReleasePolicy.REUSE:
                return cls(reuse_distance=knobs.max_reuse_distance)
            case _:
                return cls()

    def choice(self, unit: int) -> UnitChoice:
        """What was chosen for a unit, the distance aside."""
        if unit in self.persistent:
            return UnitChoice.PERSIST
        return UnitChoice.KEEP if unit in self.kept else UnitChoice.RELEASE

    def layout(self, layout: Layout) -> Layout:
        """The layout in which the parameters of persistent units are persistent."""
        if not self.persistent:
            return layout
        units = [
            replace(size, params=tuple(replace(param, persistent=True) for param in size.params))
            if index in self.persistent
            else size
            for index, size in enumerate(layout.units)
        ]
        return Layout(tuple(units), layout.ranks)

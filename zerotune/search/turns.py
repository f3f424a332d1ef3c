"""One knob turned at a time, and then together what made the defaults better.

The defaults are a strong place to begin, and most knobs act by themselves: a handful of turns says what each of them is
worth, where as many points at random say it of none. What helped is put together, and from there on the sampler has
something to go by. A user sees in the table which knob did it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerotune.config.space import Dimension, Value
from zerotune.records import RunRecord
from zerotune.search.configuration import canonical_key
from zerotune.search.confirm import better_key
from zerotune.search.dimensions import Choices
from zerotune.search.feasibility import is_feasible
from zerotune.search.plan import SearchPlan

_FIRST = ("release", "prefetch_distance", "reduce_bucket_size")
"""Knobs that usually matter most, turned first: a search of few trials does not get to all."""

_SHARE = 2
"""Turns take one of so many trials at most; the others are the sampler's."""


def turned_from_defaults(plan: SearchPlan) -> Iterator[Choices]:
    """The point of the space that is next to the defaults, with one knob turned to the end of its values."""
    start = plan.nearest(plan.baseline)
    for dimension in _in_order(plan)[: plan.search.trials // _SHARE]:
        yield _turned(plan, start, dimension)


def together(plan: SearchPlan, known: Mapping[str, RunRecord]) -> Choices | None:
    """All the turns that made the defaults better, at once.

    Args:
        plan: What is asked.
        known: Finished runs by the canonical key of their configuration; the turns are among them.

    Returns:
        A point of the space; ``None`` if fewer than two made anything better.
    """
    better = better_key(plan.search.objective)
    baseline = known[plan.baseline_key]
    start = plan.nearest(plan.baseline)
    best = dict(start)
    for choices in turned_from_defaults(plan):
        record = known.get(canonical_key(plan.configure(choices)))
        if record is not None and is_feasible(record) and better(record) < better(baseline):
            best |= {name: value for name, value in choices.items() if start.get(name) != value}
    is_combination = sum(start.get(name) != value for name, value in best.items()) > 1
    return best if is_combination else None


def _in_order(plan: SearchPlan) -> list[Dimension]:
    """What can be turned by itself: knobs that always have a meaning, and more than one value."""
    free = [dimension for dimension in plan.space if not dimension.when and len(_ends(dimension)) > 1]
    return sorted(free, key=lambda d: _FIRST.index(d.name) if d.name in _FIRST else len(_FIRST))


def _turned(plan: SearchPlan, start: Choices, dimension: Dimension) -> Choices:
    first, last = _ends(dimension)
    choices = start | {dimension.name: first if start[dimension.name] == last else last}
    for other in plan.space:
        if other.is_active(choices) and other.name not in choices:
            choices[other.name] = _ends(other)[-1]
    return {d.name: choices[d.name] for d in plan.space if d.is_active(choices)}


def _ends(dimension: Dimension) -> list[Value]:
    """The first and the last value; one if there is only one."""
    ends = (
        (dimension.values[0], dimension.values[-1]) if dimension.values else (dimension.low, dimension.high)
    )
    return list(dict.fromkeys(ends))

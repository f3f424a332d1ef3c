"""One knob turned at a time, and then together what made the defaults better.

The defaults are a strong place to begin, and most knobs act by themselves: a handful of turns says what each of them is
worth, where as many points at random say it of none. What helped is put together, and from there on the sampler has
something to go by. A user sees in the table which knob did it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zerotune.config.schema import JobConfig
from zerotune.config.space import Dimension, Value
from zerotune.records import RunRecord
from zerotune.search.configuration import canonical_key
from zerotune.search.dimensions import Choices
from zerotune.search.feasibility import is_feasible
from zerotune.search.plan import SearchPlan

_FOR_SPEED = ("release", "prefetch_distance", "reduce_bucket_size")
_FOR_MEMORY = ("activation_checkpointing", "micro_batch_size", "unit_size")
"""Knobs that usually matter most, turned first: a search of few trials does not get to all."""

_SHARE = 2
"""One of so many trials is a turn, at most."""


@dataclass(frozen=True)
class Turn:
    """Choices for some knobs, beside the defaults for all others.

    Attributes:
        choices: What is chosen.
        job: The configuration, every knob a number.
    """

    choices: Choices
    job: JobConfig

    @property
    def key(self) -> str:
        """Canonical key of the configuration."""
        return canonical_key(self.job)


def nothing_turned(plan: SearchPlan) -> Turn:
    """What turns begin from: the defaults, but for what the file sets beside the space, and what the space does not have."""
    return _turn(plan, plan.missing(_turn(plan, {}).job))


def one_knob_turned(plan: SearchPlan) -> Iterator[Turn]:
    """Each knob at the end of its values: where it uses most memory, or least if that is what is sought."""
    start = nothing_turned(plan)
    for dimension in _in_order(plan)[: plan.search.trials // _SHARE]:
        first, last = _ends(dimension)
        now = plan.nearest(start.job)[dimension.name]
        is_size = isinstance(last, (int, float)) and not isinstance(last, bool)
        wanted, other = (first, last) if plan.search.objective == "memory" and is_size else (last, first)
        yield _turn(plan, start.choices | {dimension.name: other if now == wanted else wanted})


def together(plan: SearchPlan, known: Mapping[str, RunRecord]) -> Turn | None:
    """All the turns that made what they began from better, at once.

    Args:
        plan: What is asked.
        known: Finished runs by the canonical key of their configuration; the turns are among them.

    Returns:
        ``None`` if fewer than two did.
    """
    start = nothing_turned(plan)
    before = known.get(start.key)
    if before is None or not is_feasible(before):
        return None
    choices, helped = start.choices, 0
    for turn in one_knob_turned(plan):
        record = known.get(turn.key)
        if record is not None and is_feasible(record) and _helped(record, before, plan.search.objective):
            choices = choices | {
                name: value for name, value in turn.choices.items() if start.choices.get(name) != value
            }
            helped += 1
    return _turn(plan, choices) if helped > 1 else None


def _helped(record: RunRecord, before: RunRecord, objective: str) -> bool:
    """Whether it is better; in speed beyond what single measurements leave open, for harmless turns are not to be taken along."""
    now, then = record.measurement, before.measurement
    assert now is not None and then is not None
    if objective == "memory":
        return now.peak_memory_bytes < then.peak_memory_bytes
    return now.tokens_per_second.low > then.tokens_per_second.high


def _turn(plan: SearchPlan, choices: Choices) -> Turn:
    """With the last value for each knob that these choices alone give a meaning."""
    for dimension in plan.space:
        has_meaning = dimension.when and dimension.is_active(choices)
        if has_meaning and dimension.name not in choices:
            choices = choices | {dimension.name: _ends(dimension)[-1]}
    return Turn(choices, plan.from_defaults(choices))


def _in_order(plan: SearchPlan) -> list[Dimension]:
    """What can be turned by itself: knobs that always have a meaning, and more than one value."""
    first = _FOR_MEMORY if plan.search.objective == "memory" else _FOR_SPEED
    free = [dimension for dimension in plan.space if not dimension.when and len(_ends(dimension)) > 1]
    return sorted(free, key=lambda d: first.index(d.name) if d.name in first else len(first))


def _ends(dimension: Dimension) -> list[Value]:
    """The first and the last value; one if there is only one."""
    if dimension.values is None:
        return list(dict.fromkeys((dimension.low, dimension.high)))
    return list(dict.fromkeys((dimension.values[0], dimension.values[-1])))

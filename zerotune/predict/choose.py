"""The choice behind ``release: planned``: which units to keep or to make persistent within a memory budget.

What a plan costs and needs is read off a replay of the schedules it gives. Every global setting of ``release`` is
a plan too, and is looked at first, so that by prediction none that fits is better than what is chosen. Few units are
searched through; for many, plans of a regular shape are tried and the best of them improved unit by unit.

Bytes at an event are those that were measured there, less what full parameters and gather buffers took under the schedule
that was followed, persistent units among them, plus what they take under the plan in question. Seconds are scaled so that
what was followed is predicted to take what it took.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from zerotune.config.knobs import Knobs
from zerotune.predict.replay import Replay, replay
from zerotune.records import PassProfile, Profile
from zerotune.schedule import EventKind, Layout, Phase, ReleasePlan, Schedule, compile_schedule

EXHAUSTIVE_UNITS = 8
"""With so many units to choose for, every set of kept ones is tried."""

MOST_PLANS = 600
"""Plans tried at most. Each costs a compilation and a replay, once in a training."""

MOST_DISTANCES = 16
"""Distances of ``release: reuse`` that are tried; of more, as many are picked evenly."""


MOST_COUNTS = 32
"""Lengths of the runs of kept units that are tried; of more, as many are picked evenly."""


@dataclass(frozen=True)
class Choice:
    """A plan and what it is predicted to do.

    Attributes:
        plan: The plan.
        seconds: Of one step.
        peak_bytes: The most bytes that the allocator holds.
    """

    plan: ReleasePlan
    seconds: float
    peak_bytes: int


def choose(
    schedules: Sequence[Schedule],
    profile: Profile,
    knobs: Knobs,
    layout: Layout,
    budget: int,
    reduces: bool = True,
    followed: ReleasePlan | None = None,
    most_plans: int = MOST_PLANS,
) -> Choice | None:
    """Choose for every unit.

    Args:
        schedules: What was followed when the profile was taken, in the order of its passes.
        profile: Of one step, with bytes.
        knobs: Resolved knobs.
        layout: The model's units, without what a plan makes persistent.
        budget: Bytes that the allocator may hold at most.
        reduces: Whether passes reduce their gradients.
        followed: The plan of these schedules; by default every unit was released after use.
        most_plans: Plans tried at most.

    Returns:
        The fastest plan that fits; of equals the one that needs least. The same on every rank that gives the same
        arguments. ``None`` if not even releasing everything fits.
    """
    predict = Predictor(schedules, profile, knobs, layout, reduces, followed)
    return _Search(predict, budget, most_plans).run()


class Predictor:
    """Seconds and bytes of a step under any plan; arguments as for :func:`choose`."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        profile: Profile,
        knobs: Knobs,
        layout: Layout,
        reduces: bool = True,
        followed: ReleasePlan | None = None,
    ) -> None:
        self.layout = layout
        self.traces = [schedule.trace for schedule in schedules]
        self._followed = schedules
        self._profile = profile
        self._knobs = knobs
        self._reduces = reduces
        plan = followed or ReleasePlan()
        actual = plan.layout(layout)
        replays = [
            replay(schedule, actual, one.compute_s, profile)
            for schedule, one in zip(schedules, profile.passes, strict=True)
        ]
        known_s = self._refresh_s(plan)
        known_s += sum(r.seconds * one.count for r, one in zip(replays, profile.passes, strict=True))
        self._rest_s = max(profile.step_s - known_s, 0.0)
        self._scale = min(profile.step_s / known_s, 1.0) if known_s else 1.0
        self._persisted = self._persistent_bytes(plan)
        self._others = [self._other_bytes(r, one) for r, one in zip(replays, profile.passes, strict=True)]

    def _persistent_bytes(self, plan: ReleasePlan) -> int:
        return sum(self.layout.padded(unit) for unit in plan.persistent) * self._profile.gather_itemsize

    def _other_bytes(self, followed: Replay, one: PassProfile) -> list[tuple[int, int]]:
        """For each event, bytes beside full parameters: during its actions, and in the compute after them."""
        size, persisted = self._profile.gather_itemsize, self._persisted
        others: list[tuple[int, int]] = []
        before = 0
        for load, acting, computing in zip(
            followed.loads, one.acting_bytes, one.computing_bytes, strict=False
        ):
            after = computing - load.held * size - persisted
            # When within its actions an event held most is not known: no less than before and after them.
            others.append((max(acting - load.acting_held * size - persisted, before, after), after))
            before = after
        return others

    def __call__(self, plan: ReleasePlan) -> Choice:
        layout = plan.layout(self.layout)
        size = self._profile.gather_itemsize
        persistent = self._persistent_bytes(plan)
        seconds = self._refresh_s(plan)
        peak = 0
        for followed, one, others in zip(self._followed, self._profile.passes, self._others, strict=True):
            schedule = compile_schedule(followed.trace, self._knobs, layout, self._reduces, plan)
            found = replay(schedule, layout, one.compute_s, self._profile)
            seconds += found.seconds * one.count
            if schedule.actions == followed.actions and persistent == self._persisted:
                peak = max((peak, *one.acting_bytes, *one.computing_bytes))  # as measured
                continue
            for load, (acting, computing) in zip(found.loads, others, strict=False):
                most = max(acting + load.acting_held * size, computing + load.held * size)
                peak = max(peak, most + persistent)
            if others:  # the refresh after the step has a gather buffer for all of them
                peak = max(peak, others[-1][1] + 2 * persistent)
        return Choice(plan, seconds * self._scale + self._rest_s, peak)

    def _refresh_s(self, plan: ReleasePlan) -> float:
        """Seconds that gathering persistent parameters once a step takes; nothing runs beside it."""
        nbytes = self._persistent_bytes(plan)
        if not nbytes or self.layout.ranks == 1:
            return 0.0
        link = self._profile.link
        sent = nbytes * (self.layout.ranks - 1) / self.layout.ranks
        return link.latency_s + sent * link.seconds_per_byte + nbytes * link.handled_s_per_byte

    def units(self) -> list[int]:
        """Units that a plan may decide about, those used last in forward first."""
        last: dict[int, None] = {}
        for trace in self.traces:
            for event in trace.events:
                for unit in event.units:
                    if event.phase is Phase.FORWARD:
                        last.pop(unit, None)
                    last.setdefault(unit)
        return [unit for unit in reversed(last) if self.layout.padded(unit)]


class _Search:
    def __init__(self, predict: Predictor, budget: int, most_plans: int) -> None:
        self._predict = predict
        self._budget = budget
        self._left = most_plans
        self._known: dict[ReleasePlan, Choice] = {}
        self.units = predict.units()

    def run(self) -> Choice | None:
        for plan in self._global_settings():
            self._look(plan, spend=False)
        if len(self.units) <= EXHAUSTIVE_UNITS:
            for kept in _subsets(self.units):
                self._look(ReleasePlan(kept=frozenset(kept)))
        else:
            for plan in self._regular_plans():
                self._look(plan)
        best = self._best()
        while best is not None and (better := self._improve(best)) is not None:
            best = better
        return best

    def _look(self, plan: ReleasePlan, spend: bool = True) -> Choice | None:
        """What a plan does; ``None`` once enough have been looked at."""
        found = self._known.get(plan)
        if found is None:
            if spend and self._left <= 0:
                return None
            self._left -= 1
            found = self._known[plan] = self._predict(plan)
        return found

    def _best(self) -> Choice | None:
        fitting = [choice for choice in self._known.values() if choice.peak_bytes <= self._budget]
        return min(fitting, key=_rank, default=None)

    def _global_settings(self) -> Iterator[ReleasePlan]:
        yield ReleasePlan()
        yield ReleasePlan(kept=frozenset(self.units))
        for distance in _evenly(sorted(self._distances()), MOST_DISTANCES):
            yield ReleasePlan(reuse_distance=distance)

    def _distances(self) -> set[int]:
        """Elements used between two uses of a unit: the values at which ``release: reuse`` changes what it does."""
        layout = self._predict.layout
        distances: set[int] = set()
        for trace in self._predict.traces:
            used = 0
            closed: dict[int, int] = {}
            for event in trace.events:
                if event.kind is EventKind.EXIT:
                    closed |= dict.fromkeys(event.units, used)
                    continue
                needed = layout.needed(event.units, event.phase is Phase.BACKWARD)
                distances |= {used - closed[unit] for unit in needed if unit in closed}
                used += sum(map(layout.numel, needed))
        return distances

    def _regular_plans(self) -> Iterator[ReleasePlan]:
        """The last units of forward, whose backward comes first; the first ones; and every second, third, …"""
        order = self.units
        for count in _evenly(range(1, len(order)), MOST_COUNTS):
            yield ReleasePlan(kept=frozenset(order[:count]))
            yield ReleasePlan(kept=frozenset(order[-count:]))
        for step in range(2, min(len(order), 9)):
            for start in range(step):
                yield ReleasePlan(kept=frozenset(order[start::step]))

    def _improve(self, best: Choice) -> Choice | None:
        """The best of the plans that differ in one unit, or in two that change places."""
        for plan in self._neighbours(best.plan):
            if self._look(plan) is None:
                break
        found = self._best()
        return found if found is not None and _rank(found) < _rank(best) else None

    def _neighbours(self, plan: ReleasePlan) -> Iterator[ReleasePlan]:
        for unit in self.units:
            if unit not in plan.persistent:
                yield replace(plan, kept=plan.kept ^ {unit})
            yield replace(plan, kept=plan.kept - {unit}, persistent=plan.persistent ^ {unit})
        for kept in sorted(plan.kept):
            for unit in self.units:
                if unit not in plan.kept and unit not in plan.persistent:
                    yield replace(plan, kept=plan.kept - {kept} | {unit})


def _rank(choice: Choice) -> tuple[float, int, int, int, list[int], list[int]]:
    """Faster first, then smaller, then simpler; no two plans are equal."""
    plan = choice.plan
    distance = -1 if plan.reuse_distance is None else plan.reuse_distance
    units = len(plan.kept) + len(plan.persistent)
    return (
        choice.seconds,
        choice.peak_bytes,
        distance,
        units,
        sorted(plan.kept),
        sorted(plan.persistent),
    )


def _subsets(units: Sequence[int]) -> Iterator[Iterable[int]]:
    for size in range(len(units) + 1):
        yield from combinations(units, size)


def _evenly(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the values, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]

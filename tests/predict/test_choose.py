"""The choice is within the budget, no worse than any global setting, and the best there is for few units."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.predict.strategies import blocks, links, measured, profile_of
from tests.schedule.strategies import layouts, nested_traces, plain_trace
from zerotune.config.knobs import Knobs
from zerotune.predict import Choice, Predictor, choose, replay
from zerotune.records import Link, Profile
from zerotune.schedule import Layout, ReleasePlan, Schedule, compile_schedule

Step = tuple[Schedule, Profile, Knobs, Layout]


@st.composite
def steps(draw: st.DrawFn, most: int = 5) -> Step:
    """One step of a model whose units are used one after the other, with activations of any shape beside them."""
    layout = blocks(draw(st.lists(st.integers(1, 400), min_size=2, max_size=most)), draw(st.integers(2, 4)))
    trace = plain_trace(len(layout.units))
    count = len(trace.events)
    compute_s = draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    others = draw(st.lists(st.integers(0, 20_000), min_size=count, max_size=count))
    knobs = {"prefetch_distance": draw(st.integers(0, 800)), "reduce_bucket_size": draw(st.integers(0, 800))}
    return *measured(
        trace, layout, compute_s, others, draw(links()), count=draw(st.integers(1, 3)), **knobs
    ), layout


def seconds_of(step: Step, plan: ReleasePlan | None = None, **knobs: object) -> tuple[float, int]:
    """Seconds of the step's passes and peak of live elements under a plan, or under other knobs."""
    schedule, profile, settled, layout = step
    found = compile_schedule(
        schedule.trace, settled.model_copy(update=knobs), layout, plan=None if knobs else plan
    )
    one = profile.passes[0]
    played = replay(found, layout, one.compute_s, profile)
    return played.seconds * one.count, found.peak_live


def budgets(step: Step) -> st.SearchStrategy[int]:
    room = 4 * step[3].total_padded
    return st.integers(step[1].peak_bytes, step[1].peak_bytes + 2 * room)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_it_fits_and_no_global_setting_that_fits_is_faster(data: st.DataObject) -> None:
    step = data.draw(steps(7))
    schedule, profile, knobs, layout = step
    budget = data.draw(budgets(step))
    most = data.draw(st.sampled_from([1, 20, 600]))
    choice = choose([schedule], profile, knobs, layout, budget, most_plans=most)
    assert choice is not None and choice.peak_bytes <= budget
    distance = data.draw(st.integers(0, layout.total_numel))
    for setting in (
        ReleasePlan(),
        ReleasePlan(kept=frozenset(range(len(layout.units)))),
        ReleasePlan(reuse_distance=distance),
    ):
        found = predicted(step, setting)
        assert found.peak_bytes > budget or choice.seconds <= found.seconds


@given(steps())
@settings(max_examples=60, deadline=None)
def test_a_global_setting_is_the_plan_of_the_same_name(step: Step) -> None:
    layout = step[3]
    for release, distance in (("keep", None), ("after_use", None), ("reuse", 300)):
        plan = ReleasePlan.of_knobs(Knobs(release=release, max_reuse_distance=distance), len(layout.units))
        other = {"release": release, "max_reuse_distance": distance}
        assert seconds_of(step, plan) == seconds_of(step, **other)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_of_few_units_it_is_the_best_that_fits(data: st.DataObject) -> None:
    step = data.draw(steps(4))
    schedule, profile, knobs, layout = step
    budget = data.draw(budgets(step))
    choice = choose([schedule], profile, knobs, layout, budget)
    assert choice is not None
    every = [predicted(step, plan) for plan in kept_or_released(len(layout.units))]
    best = min(found.seconds for found in every if found.peak_bytes <= budget)
    assert choice.seconds <= best


@given(st.data())
@settings(max_examples=5, deadline=None)
def test_of_eight_units_it_is_the_best_that_fits(data: st.DataObject) -> None:
    layout = blocks([160] * 8)
    trace = plain_trace(8)
    others = [
        40 * (8 - abs(8 - at // 2)) for at in range(32)
    ]  # activations grow in forward, shrink in backward
    compute_s = [data.draw(st.sampled_from([0.2, 1.0, 2.0])) for _ in trace.events]
    link = Link(latency_s=0.1, seconds_per_byte=data.draw(st.sampled_from([1, 3, 6])) / 640)
    step: Step = (*measured(trace, layout, compute_s, others, link), layout)
    budget = step[1].peak_bytes + data.draw(st.integers(0, 8)) * 640
    choice = choose([step[0]], step[1], step[2], layout, budget)
    assert choice is not None
    every = [predicted(step, plan) for plan in kept_or_released(8)]
    assert choice.seconds <= min(found.seconds for found in every if found.peak_bytes <= budget)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_trace_gives_the_same_choice_again(data: st.DataObject) -> None:
    layout = data.draw(layouts(5))
    trace = data.draw(nested_traces(len(layout.units)))
    count = len(trace.events)
    numbers = st.lists(st.integers(0, 1000), min_size=count, max_size=count)
    compute_s = [n / 1000 for n in data.draw(numbers)]
    schedule, profile, knobs = measured(trace, layout, compute_s, data.draw(numbers), data.draw(links()))
    budget = profile.peak_bytes + data.draw(st.integers(0, 8000))
    found = [choose([schedule], profile, knobs, layout, budget, most_plans=60) for _ in range(2)]
    assert found[0] == found[1] and found[0] is not None and found[0].peak_bytes <= budget


def test_a_budget_below_what_releasing_all_needs_has_no_choice() -> None:
    layout = blocks([160] * 3)
    schedule, profile, knobs = measured(plain_trace(3), layout, [1.0] * 12, [5000] * 12, Link())
    assert choose([schedule], profile, knobs, layout, profile.peak_bytes - 1) is None
    assert choose([schedule], profile, knobs, layout, profile.peak_bytes) is not None


def test_room_away_from_the_peak_is_used() -> None:
    """The peak is at the first forward events; what is kept at the turn from forward to backward costs nothing."""
    layout = blocks([160] * 4)
    others = [9000, 9000] + [0] * 14
    schedule, profile, knobs = measured(
        plain_trace(4), layout, [0.1] * 16, others, Link(seconds_per_byte=0.01)
    )
    choice = choose([schedule], profile, knobs, layout, profile.peak_bytes)
    assert choice is not None
    assert choice.plan.kept >= {1, 2}
    assert choice.seconds < profile.step_s


def test_with_micro_batches_a_unit_persists_where_there_is_room() -> None:
    """Four passes a step gather a unit eight times; a persistent one is gathered once."""
    layout = blocks([160] * 3)
    schedule, profile, knobs = measured(
        plain_trace(3), layout, [0.1] * 12, [0] * 12, Link(seconds_per_byte=0.01), count=4
    )
    roomy = choose([schedule], profile, knobs, layout, profile.peak_bytes + 8 * 640)
    tight = choose([schedule], profile, knobs, layout, profile.peak_bytes)
    assert roomy is not None and tight is not None
    assert roomy.plan.persistent == {0, 1, 2}
    assert not tight.plan.persistent
    assert roomy.seconds < tight.seconds


@pytest.mark.parametrize("units", [20, 40])
def test_many_units_fill_the_room(units: int) -> None:
    layout = blocks([160] * units)
    events = 4 * units
    schedule, profile, knobs = measured(
        plain_trace(units), layout, [0.1] * events, [0] * events, Link(seconds_per_byte=0.001)
    )
    budget = profile.peak_bytes + 640 * (units // 2)
    choice = choose([schedule], profile, knobs, layout, budget, most_plans=200)
    assert choice is not None and choice.peak_bytes <= budget
    assert len(choice.plan.kept) >= units // 2
    assert choice.seconds < predicted((schedule, profile, knobs, layout), ReleasePlan()).seconds


def predicted(step: Step, plan: ReleasePlan) -> Choice:
    """What is predicted of one plan, by the predictor that chooses."""
    schedule, profile, knobs, layout = step
    return Predictor([schedule], profile, knobs, layout)(plan)


def kept_or_released(units: int) -> list[ReleasePlan]:
    return [
        ReleasePlan(kept=frozenset(unit for unit, is_kept in enumerate(row) if is_kept))
        for row in product((False, True), repeat=units)
    ]


def test_the_profile_itself_is_predicted_exactly() -> None:
    layout = blocks([160, 64, 300])
    link = Link(seconds_per_byte=0.002, latency_s=0.01, handled_s_per_byte=1e-4)
    schedule, profile, knobs = measured(plain_trace(3), layout, [0.3] * 12, list(range(0, 1200, 100)), link)
    found = predicted((schedule, profile, knobs, layout), ReleasePlan())
    assert found.seconds == pytest.approx(profile.step_s)
    assert found.peak_bytes == profile.peak_bytes
    assert replay(schedule, layout, profile.passes[0].compute_s, profile_of(link)).peak_live == (
        schedule.peak_live
    )

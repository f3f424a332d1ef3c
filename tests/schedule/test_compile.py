"""What must always hold of a schedule: section 5 of the design, over random traces, sizes and knobs."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.replay import replay
from tests.schedule.strategies import (
    layouts,
    nested_traces,
    plain_layouts,
    plain_trace,
    plans,
    resolved_knobs,
)
from zerotune.config.knobs import Knobs, Release
from zerotune.schedule import (
    Gather,
    Layout,
    ParamSize,
    Phase,
    Reason,
    ReleasePlan,
    Trace,
    UnitChoice,
    UnitSize,
    compile_schedule,
    resolve_knobs,
)
from zerotune.schedule.schedule import SavingReason

EXAMPLES = 300


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_invariant_holds_over_random_nested_traces(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    trace = data.draw(nested_traces(len(layout.units)))
    knobs = data.draw(resolved_knobs())
    check_invariants(trace, knobs, layout)


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_invariant_holds_under_any_choice_for_every_unit(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    trace = data.draw(nested_traces(len(layout.units)))
    knobs = data.draw(resolved_knobs()).model_copy(
        update={"release": Release.PLANNED, "max_reuse_distance": None}
    )
    plan = data.draw(plans(len(layout.units)))
    check_invariants(trace, knobs, plan.layout(layout), plan)


def check_invariants(trace: Trace, knobs: Knobs, layout: Layout, plan: ReleasePlan | None = None) -> None:
    schedule = compile_schedule(trace, knobs, layout, plan=plan)
    result = replay(schedule, layout, knobs)
    assert result.gathered == schedule.gathered_elements(layout)
    assert result.reduced == schedule.reduced_elements(layout)
    assert result.peak_live == schedule.peak_live
    assert result.peak_ahead <= schedule.peak_ahead
    trainable = {ref for ref in layout.refs() if layout.param(ref).trainable}
    expected = dict.fromkeys(trainable, 1) if trace.has_backward else {}
    assert result.reductions == expected


@given(plain_layouts(), resolved_knobs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_plain_model_moves_3p_less_the_listed_savings(layout: Layout, knobs: Knobs) -> None:
    knobs = knobs.model_copy(update={"release": "after_use", "max_reuse_distance": None})
    schedule = compile_schedule(plain_trace(len(layout.units)), knobs, layout)
    moved = schedule.gathered_elements(layout) + schedule.reduced_elements(layout)
    saved = sum(saving.elements for saving in schedule.savings)
    assert moved + saved == 3 * layout.total_padded
    last = len(layout.units) - 1
    stayed = [s.unit for s in schedule.savings if s.reason == SavingReason.WITHIN_DISTANCE]
    assert stayed == list(range(last - len(stayed), last)), "those used last in forward, none left out"
    assert sum(layout.numel(unit) for unit in stayed) <= max(
        [knobs.prefetch_distance, *(layout.numel(unit) for unit in stayed)]
    )
    allowed = {(0, SavingReason.NO_WEIGHTS_IN_BACKWARD), (last, SavingReason.USED_NEXT)}
    others = {(s.unit, s.reason) for s in schedule.savings if s.unit not in stayed}
    assert others <= allowed


@given(plain_layouts(), resolved_knobs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_keep_moves_2p_on_a_plain_model_without_a_live_bound(layout: Layout, knobs: Knobs) -> None:
    knobs = knobs.model_copy(
        update={"release": "keep", "max_reuse_distance": None, "max_live_parameters": None}
    )
    schedule = compile_schedule(plain_trace(len(layout.units)), knobs, layout)
    assert schedule.gathered_elements(layout) + schedule.reduced_elements(layout) == 2 * layout.total_padded


@given(plain_layouts(), resolved_knobs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_on_demand_the_peak_is_the_largest_unit_and_its_buffer(layout: Layout, knobs: Knobs) -> None:
    knobs = knobs.model_copy(
        update={
            "release": "after_use",
            "max_reuse_distance": None,
            "prefetch_distance": 0,
            "backward_prefetch_distance": 0,
        }
    )
    schedule = compile_schedule(plain_trace(len(layout.units)), knobs, layout)
    assert schedule.peak_live == 2 * max(layout.padded(u) for u in range(len(layout.units)))
    assert schedule.peak_ahead == 0


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_same_trace_and_knobs_give_the_same_schedule(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    trace = data.draw(nested_traces(len(layout.units)))
    knobs = data.draw(resolved_knobs())
    again = Layout(tuple(layout.units), layout.ranks)
    assert compile_schedule(trace, knobs, layout).digest == compile_schedule(trace, knobs, again).digest


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_keep_never_gathers_more_than_after_use(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    trace = data.draw(nested_traces(len(layout.units)))
    knobs = data.draw(resolved_knobs()).model_copy(
        update={"max_live_parameters": None, "max_reuse_distance": None}
    )
    sums = [
        compile_schedule(trace, knobs.model_copy(update={"release": release}), layout).gathered_elements(
            layout
        )
        for release in ("keep", "after_use")
    ]
    assert sums[0] <= sums[1]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_setting_for_all_units_is_the_same_choice_for_each(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    trace = data.draw(nested_traces(len(layout.units)))
    knobs = data.draw(resolved_knobs())
    planned = knobs.model_copy(update={"release": Release.PLANNED})
    plan = ReleasePlan.of_knobs(knobs, len(layout.units))
    assert compile_schedule(trace, planned, layout, plan=plan) == compile_schedule(trace, knobs, layout)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_without_a_plan_planned_releases_after_use(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    trace = data.draw(nested_traces(len(layout.units)))
    knobs = data.draw(resolved_knobs())
    found = [
        compile_schedule(trace, knobs.model_copy(update={"release": release}), layout)
        for release in (Release.PLANNED, Release.AFTER_USE)
    ]
    assert found[0] == found[1]


def test_a_kept_unit_is_gathered_once_and_a_released_one_twice() -> None:
    layout = blocks(4)
    knobs = resolve_knobs(Knobs(prefetch_distance=0, param_persistence_threshold=0), 160)
    plan = ReleasePlan(kept=frozenset({1}), persistent=frozenset({2}))
    schedule = compile_schedule(plain_trace(4), knobs, plan.layout(layout), plan=plan)
    assert [g.units for g in schedule.gathers()] == [(0,), (1,), (3,), (0,)]
    choices = [plan.choice(unit) for unit in range(3)]
    assert choices == [UnitChoice.RELEASE, UnitChoice.KEEP, UnitChoice.PERSIST]


def blocks(count: int, numel: int = 160) -> Layout:
    return Layout(
        tuple(UnitSize(f"b{i}", (ParamSize(f"b{i}.w", numel),), is_block=True) for i in range(count)), 2
    )


def test_the_distances_set_how_many_units_are_ahead() -> None:
    layout = blocks(8)
    for forward, backward in itertools.product(range(4), range(4)):
        knobs = Knobs(
            prefetch_distance=160 * forward,
            backward_prefetch_distance=160 * backward,
            param_persistence_threshold=0,
        )
        schedule = compile_schedule(plain_trace(8), resolve_knobs(knobs, 160), layout)
        assert schedule.peak_ahead == 160 * max(forward, backward)
        if forward >= backward:
            first = next(i for i, e in enumerate(schedule.trace.events) if e.phase is Phase.BACKWARD)
            demanded = [a for step in schedule.actions[first:] for a in step if isinstance(a, Gather)]
            assert all(gather.reason is Reason.PREFETCH for gather in demanded) == (backward > 0)


def test_the_distance_of_backward_follows_unless_it_is_set() -> None:
    def resolved(**knobs: int) -> tuple[int, int]:
        found = resolve_knobs(Knobs(**knobs), 160)
        return int(found.prefetch_distance), int(found.backward_prefetch_distance)

    assert resolved() == (4 * 160, 4 * 160)
    assert resolved(prefetch_distance=0) == (0, 0)
    assert resolved(prefetch_distance=5) == (5, 5)
    assert resolved(prefetch_distance=5, backward_prefetch_distance=10) == (5, 10)
    assert resolved(backward_prefetch_distance=5) == (4 * 160, 5)


def test_one_unit_larger_than_the_distance_still_goes_ahead() -> None:
    knobs = resolve_knobs(Knobs(prefetch_distance=1, param_persistence_threshold=0), 160)
    schedule = compile_schedule(plain_trace(8), knobs, blocks(8))
    assert schedule.peak_ahead == 160


def test_the_bucket_merges_what_the_distance_admits() -> None:
    layout = blocks(9)
    knobs = resolve_knobs(
        Knobs(prefetch_distance=320, allgather_bucket_size=320, param_persistence_threshold=0), 160
    )
    gathers = compile_schedule(plain_trace(9), knobs, layout).gathers()
    assert [g.units for g in gathers] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
        (8,),
        (6, 5),
        (4, 3),
        (2, 1),
        (0,),
    ], "7 would be gathered again at the event that drops it, so it stays"


def test_under_pressure_the_unit_with_the_farthest_next_use_goes() -> None:
    layout = blocks(4)
    knobs = resolve_knobs(
        Knobs(release="keep", prefetch_distance=0, max_live_parameters=480, param_persistence_threshold=0),
        160,
    )
    schedule = compile_schedule(plain_trace(4), knobs, layout)
    # Two units and one buffer fit. Unit 0 is needed last in backward, so it goes first, then 1; 2 and 3 stay.
    assert [g.units for g in schedule.gathers()] == [(0,), (1,), (2,), (3,), (1,), (0,)]


def test_a_reduce_bucket_smaller_than_a_parameter_carries_it_alone() -> None:
    knobs = resolve_knobs(Knobs(reduce_bucket_size=1, param_persistence_threshold=0), 160)
    schedule = compile_schedule(plain_trace(4), knobs, blocks(4))
    assert [len(bucket.params) for bucket in schedule.reductions()] == [1, 1, 1, 1]

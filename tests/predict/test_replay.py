"""What must hold of every prediction of a pass."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.predict.strategies import SECONDS, blocks, links, profile_of
from tests.schedule.strategies import layouts, nested_traces, plain_trace, resolved_knobs
from zerotune.config.knobs import Knobs
from zerotune.predict import Replay, replay
from zerotune.records import Link
from zerotune.schedule import Layout, Schedule, compile_schedule, resolve_knobs

EXAMPLES = 200


@st.composite
def passes(draw: st.DrawFn) -> tuple[Schedule, Layout, list[float]]:
    layout = draw(layouts())
    trace = draw(nested_traces(len(layout.units)))
    schedule = compile_schedule(trace, draw(resolved_knobs()), layout)
    count = len(trace.events)
    return schedule, layout, draw(st.lists(SECONDS, min_size=count, max_size=count))


def bytes_sent(schedule: Schedule, layout: Layout) -> float:
    full = schedule.gathered_elements(layout) + schedule.reduced_elements(layout)
    return full * 4 * (layout.ranks - 1) / layout.ranks


@given(passes(), links(), st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_it_takes_at_least_the_compute_and_at_least_the_bytes(
    one: tuple[Schedule, Layout, list[float]], link: Link, overlaps: bool
) -> None:
    schedule, layout, compute_s = one
    found = replay(schedule, layout, compute_s, profile_of(link, overlaps))
    slack = 1 + 1e-9
    assert found.seconds * slack >= math.fsum(compute_s)
    assert found.seconds * slack >= bytes_sent(schedule, layout) * link.seconds_per_byte
    assert sum(load.sent_bytes for load in found.loads) == pytest.approx(bytes_sent(schedule, layout))


@given(passes(), links(), st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_peak_is_the_schedules_own(
    one: tuple[Schedule, Layout, list[float]], link: Link, overlaps: bool
) -> None:
    schedule, layout, compute_s = one
    found = replay(schedule, layout, compute_s, profile_of(link, overlaps))
    assert found.peak_live == schedule.peak_live
    assert found.loads[-1].live == 0


@given(passes(), links(), st.floats(0, 1))
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_faster_link_is_never_slower(
    one: tuple[Schedule, Layout, list[float]], link: Link, factor: float
) -> None:
    faster = link.model_copy(
        update={"seconds_per_byte": link.seconds_per_byte * factor, "latency_s": link.latency_s * factor}
    )
    assert _seconds(one, faster) <= _seconds(one, link) * (1 + 1e-9) + 1e-12


@given(passes(), links())
@settings(max_examples=EXAMPLES, deadline=None)
def test_overlap_never_costs_where_it_steals_nothing(
    one: tuple[Schedule, Layout, list[float]], link: Link
) -> None:
    link = link.model_copy(update={"stolen_s_per_byte": 0.0})
    schedule, layout, compute_s = one
    in_line = replay(schedule, layout, compute_s, profile_of(link, overlaps=False)).seconds
    assert _seconds(one, link) <= in_line * (1 + 1e-9) + 1e-12


@given(passes())
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_free_link_leaves_the_compute(one: tuple[Schedule, Layout, list[float]]) -> None:
    schedule, layout, compute_s = one
    found = replay(schedule, layout, compute_s, profile_of(Link()))
    assert found.seconds == pytest.approx(math.fsum(compute_s))
    assert found.exposed_s == 0


@given(passes(), links())
@settings(max_examples=EXAMPLES, deadline=None)
def test_time_is_compute_handling_stealing_and_standing(
    one: tuple[Schedule, Layout, list[float]], link: Link
) -> None:
    schedule, layout, compute_s = one
    found = replay(schedule, layout, compute_s, profile_of(link))
    handled = sum(load.handled_bytes for load in found.loads) * link.handled_s_per_byte
    stolen = sum(load.sent_bytes for load in found.loads) * link.stolen_s_per_byte
    assert found.seconds == pytest.approx(math.fsum(compute_s) + handled + stolen + found.exposed_s)


@given(passes(), links())
@settings(max_examples=EXAMPLES, deadline=None)
def test_gradients_that_stay_are_handled_once_and_not_twice(
    one: tuple[Schedule, Layout, list[float]], link: Link
) -> None:
    schedule, layout, compute_s = one
    copied = profile_of(link)
    there = copied.model_copy(update={"copies_gradients": False})
    handled = [
        sum(load.handled_bytes for load in replay(schedule, layout, compute_s, profile).loads)
        for profile in (copied, there)
    ]
    assert handled[0] - handled[1] == pytest.approx(4 * schedule.reduced_elements(layout))


def test_the_seconds_of_two_blocks_by_hand() -> None:
    """Two blocks of 64 elements on two ranks: every gather sends 128 bytes, every reduction too."""
    layout = blocks([64, 64])
    knobs = resolve_knobs(Knobs(prefetch_distance=64, param_persistence_threshold=0), 64)
    schedule = compile_schedule(plain_trace(2), knobs, layout)
    link = Link(seconds_per_byte=1 / 128)
    compute_s = [3.0, 0.0, 3.0, 0.0, 5.0, 0.0, 5.0, 0.0]
    found = replay(schedule, layout, compute_s, profile_of(link))
    # The first gather is waited for; the others run beside compute, and of the reductions all but the last.
    assert [gather.units for gather in schedule.gathers()] == [(0,), (1,), (0,)]
    assert found.exposed_s == pytest.approx(1.0 + 1.0)
    assert found.seconds == pytest.approx(1 + 3 + 3 + 5 + 5 + 1)


def test_zeros_that_do_not_travel_take_no_time_of_the_link() -> None:
    """Of unit 0, whose reduction is the last and waited for, three quarters of the bytes are left out."""
    layout = blocks([64, 64])
    knobs = resolve_knobs(Knobs(prefetch_distance=64, param_persistence_threshold=0), 64)
    schedule = compile_schedule(plain_trace(2), knobs, layout)
    compute_s = [3.0, 0.0, 3.0, 0.0, 5.0, 0.0, 5.0, 0.0]
    whole = profile_of(Link(seconds_per_byte=1 / 128))
    sparse = whole.model_copy(update={"left_out": (0.75, 0.0)})
    found = replay(schedule, layout, compute_s, sparse)
    assert found.seconds == pytest.approx(1 + 3 + 3 + 5 + 5 + 0.25)
    assert sum(load.sent_bytes for load in found.loads) == pytest.approx(3 * 128 + 128 + 32)


def _seconds(one: tuple[Schedule, Layout, list[float]], link: Link) -> float:
    schedule, layout, compute_s = one
    found: Replay = replay(schedule, layout, compute_s, profile_of(link))
    return found.seconds

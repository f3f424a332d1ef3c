"""What went into the seconds of a step's actions comes out of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.predict import EventLoad, fit_link
from zerotune.records import Link

COSTS = st.floats(1e-6, 1e-2)


@st.composite
def loads(draw: st.DrawFn) -> list[EventLoad]:
    """Events that copy, and events that issue collectives of at least two sizes."""
    sizes = draw(st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True))
    found = [EventLoad(handled_bytes=100), EventLoad()]
    for size in sizes:
        count = draw(st.integers(1, 2))
        found.append(
            EventLoad(collectives=count, sent_bytes=size * count, handled_bytes=draw(st.integers(0, 500)))
        )
    return found


def seconds(load: EventLoad, link: Link) -> float:
    sent = load.collectives * link.latency_s + load.sent_bytes * link.seconds_per_byte
    return sent + load.handled_bytes * link.handled_s_per_byte


@given(loads(), COSTS, COSTS, COSTS)
@settings(max_examples=100, deadline=None)
def test_known_costs_are_found(events: list[EventLoad], latency: float, rate: float, handled: float) -> None:
    link = Link(latency_s=latency, seconds_per_byte=rate, handled_s_per_byte=handled)
    found = fit_link(events, [seconds(load, link) for load in events])
    assert found.seconds_per_byte == pytest.approx(rate, rel=1e-3, abs=1e-7)
    assert found.handled_s_per_byte == pytest.approx(handled, rel=1e-6)
    assert found.latency_s == pytest.approx(latency, rel=1e-2, abs=1e-5)


def test_one_size_gives_a_rate_without_a_latency() -> None:
    events = [EventLoad(collectives=1, sent_bytes=100)] * 3
    assert fit_link(events, [2.0, 2.0, 2.0]) == Link(seconds_per_byte=0.02)


def test_what_compute_lost_is_spread_over_the_bytes() -> None:
    events = [EventLoad(collectives=1, sent_bytes=100)] * 4
    assert fit_link(events, [1.0] * 4, stolen_s=2.0).stolen_s_per_byte == 2.0 / 400
    assert fit_link(events, [1.0] * 4, stolen_s=-2.0).stolen_s_per_byte == 0.0


def test_a_single_rank_sends_nothing() -> None:
    events = [EventLoad(collectives=1, sent_bytes=0.0, handled_bytes=10)] * 2
    assert fit_link(events, [1.0, 1.0]) == Link()

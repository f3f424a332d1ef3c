import math
import random
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zerotune.records import Interval
from zerotune.train.measure import (
    median_interval,
    paired_ratio,
    slowest,
    stop_reason,
    student_quantile,
    throughput,
)

times = st.floats(1e-3, 1e3)
RULE = {"min_steps": 10, "max_steps": 30, "half_width": 0.02, "give_up_below": None}


@given(st.lists(times, min_size=1, max_size=60))
@example([96.0] * 5 + [95.89955747271743] * 2)  # interpolated between two equal values, it rounds
def test_median_lies_in_its_interval_and_within_the_data(values):
    interval = median_interval(values)
    assert interval.value == statistics.median(values)
    assert min(values) <= interval.low <= interval.value <= interval.high <= max(values)


@given(st.lists(times, min_size=1, max_size=40), st.floats(1e-3, 1e3), st.randoms())
def test_median_has_the_unit_of_the_data_and_no_order(values, scale, rng):
    interval = median_interval(values)
    shuffled = rng.sample(values, len(values))
    scaled = median_interval([scale * value for value in shuffled])
    for name in ("value", "low", "high"):
        assert getattr(scaled, name) == pytest.approx(scale * getattr(interval, name))


def test_known_interval():
    # Ten values: ranks 2 and 9 cover 97.9 %, ranks 3 and 8 cover 89.1 %.
    interval = median_interval([float(i) for i in range(1, 11)])
    share = (1 - 2 * 11 / 1024 - 0.95) / (2 * 45 / 1024)
    weight = 8 * share / (2 + 6 * share)
    assert interval.value == 5.5
    assert interval.low == pytest.approx(2 + weight) and interval.high == pytest.approx(9 - weight)
    assert median_interval([1.0, 2.0, 3.0]) == Interval(value=2.0, low=1.0, high=3.0)
    assert median_interval([4.0] * 10) == Interval(value=4.0, low=4.0, high=4.0)
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def coverage(draw, true_median: float, n: int, rounds: int = 2000) -> float:
    inside = 0
    for _ in range(rounds):
        interval = median_interval([draw() for _ in range(n)])
        inside += interval.low <= true_median <= interval.high
    return inside / rounds


@pytest.mark.parametrize("n", [6, 10, 15, 30])
@pytest.mark.parametrize("shape", ["normal", "log-normal", "exponential"])
def test_interval_covers_the_true_median_19_times_in_20(shape, n):
    rng = random.Random(0)
    draw, median = {
        "normal": (lambda: rng.gauss(5, 1), 5.0),
        "log-normal": (lambda: rng.lognormvariate(0, 1), 1.0),
        "exponential": (lambda: rng.expovariate(1), math.log(2)),
    }[shape]
    # 2000 rounds have a standard error of 0.5 %; the method itself is good to about 1 %.
    assert 0.93 <= coverage(draw, median, n) <= 0.975


def test_throughput_turns_the_interval_over():
    rate = throughput(Interval(value=2.0, low=1.0, high=4.0), 100.0)
    assert (rate.value, rate.low, rate.high) == (50.0, 25.0, 100.0)


def test_slowest_rank_decides_each_step():
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


NOISY = [1.0, 1.2, 0.8] * 10


@pytest.mark.parametrize(
    ("steps", "rule", "reason"),
    [
        ([1.0] * 9, {}, None),
        ([1.0] * 10, {}, "interval"),
        (NOISY[:10], {}, None),
        (NOISY[:29], {}, None),
        (NOISY[:30], {}, "budget"),
        (NOISY[:30], {"half_width": 0.3}, "interval"),
        (NOISY[:10], {"give_up_below": 130.0}, "cannot_win"),
        (NOISY[:10], {"give_up_below": 120.0}, None),
        (NOISY[:9], {"give_up_below": 1e9}, None),
        ([1.0] * 5, {"min_steps": 5, "max_steps": 5}, "interval"),
    ],
)
def test_stop_rule(steps, rule, reason):
    assert stop_reason(steps, 100.0, **(RULE | rule)) == reason


@given(st.lists(st.tuples(times, times), min_size=2, max_size=12), st.floats(1e-2, 1e2))
def test_paired_ratio(pairs, scale):
    a, b = map(list, zip(*pairs, strict=True))
    ratio, inverse = paired_ratio(a, b), paired_ratio(b, a)
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.value * inverse.value == pytest.approx(1)
    assert ratio.low * inverse.high == pytest.approx(1)
    both = paired_ratio([scale * x for x in a], [scale * y for y in b])
    assert both.value == pytest.approx(ratio.value) and both.high == pytest.approx(ratio.high, rel=1e-4)


@given(st.lists(times, min_size=2, max_size=12))
def test_a_thing_against_itself_is_one(a):
    assert paired_ratio(a, a) == Interval(value=1.0, low=1.0, high=1.0)


@pytest.mark.parametrize("rounds", [2, 4, 8, 24])
def test_paired_ratio_covers_the_true_ratio(rounds):
    # The machine's mood, shared by both in a round, is large; their own noise is small.
    rng, inside, trials = random.Random(1), 0, 2000
    for _ in range(trials):
        mood = [rng.lognormvariate(0, 0.5) for _ in range(rounds)]
        a = [1.1 * m * rng.lognormvariate(0, 0.03) for m in mood]
        b = [m * rng.lognormvariate(0, 0.03) for m in mood]
        interval = paired_ratio(a, b)
        inside += interval.low <= 1.1 <= interval.high
    assert 0.935 <= inside / trials <= 0.965


def test_paired_ratio_refuses_what_it_cannot_judge():
    for a, b in (([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0])):
        with pytest.raises(ValueError, match="paired ratio"):
            paired_ratio(a, b)


def test_student_quantiles():
    # Published values beyond the table.
    for freedom, value in (
        (1, 12.7062),
        (7, 2.3646),
        (20, 2.0860),
        (21, 2.0796),
        (30, 2.0423),
        (120, 1.9799),
    ):
        assert student_quantile(freedom) == pytest.approx(value, abs=5e-4)

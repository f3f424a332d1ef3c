"""Ratios, differences, and two runs beside each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.builders import make_cluster, make_config, make_run, make_workload
from zerotune.config.knobs import REGISTRY
from zerotune.records import Interval
from zerotune.report.comparison import compare
from zerotune.report.differences import config_differences, knob_differences
from zerotune.report.ratio import unpaired_ratio


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    value = draw(st.floats(1e-3, 1e6))
    return Interval(
        value=value, low=value * draw(st.floats(0.5, 1.0)), high=value * draw(st.floats(1.0, 2.0))
    )


@given(intervals(), intervals())
def test_a_ratio_lies_in_its_interval_and_inverts(a, b):
    ratio, inverse = unpaired_ratio(a, b), unpaired_ratio(b, a)
    assert ratio.low <= ratio.value * (1 + 1e-9) and ratio.value <= ratio.high * (1 + 1e-9)
    assert abs(ratio.value * inverse.value - 1) < 1e-6
    assert abs(ratio.low * inverse.high - 1) < 1e-6


@given(intervals())
def test_the_same_against_itself_is_one_within_the_interval(a):
    ratio = unpaired_ratio(a, a)
    assert ratio.value == 1
    assert ratio.low <= 1 <= ratio.high


def test_an_interval_that_reaches_zero_says_nothing():
    ratio = unpaired_ratio(Interval(value=1, low=0, high=2), Interval(value=1, low=1, high=1))
    assert (ratio.value, ratio.low, ratio.high) == (1, 0, float("inf"))


def test_knobs_differ_in_the_registry_s_order():
    default = make_config()
    other = make_config(micro_batch_size=1, overlap_comm=False, prefetch_distance=0)
    found = knob_differences(default, other)
    assert [each.name for each in found] == ["prefetch_distance", "overlap_comm", "micro_batch_size"]
    order = list(REGISTRY)
    assert sorted(found, key=lambda each: order.index(each.name)) == found
    assert (found[0].path, found[0].before, found[0].after) == ("zero.prefetch_distance", 790_000, 0)
    assert knob_differences(default, default) == []


def test_other_values_follow_the_knobs():
    found = config_differences(make_config(), make_config(steps=7, release="keep"))
    assert [each.path for each in found] == ["zero.release", "train.steps"]


def test_a_clear_difference():
    slow, fast = make_run("t-1", 1000.0), make_run("t-2", 1200.0)
    assert compare(slow, fast).faster == fast
    assert compare(fast, slow).faster == fast
    assert not compare(slow, fast).is_tie


def test_a_difference_in_the_noise_is_a_tie():
    found = compare(make_run("t-1", 1000.0), make_run("t-2", 1005.0))
    assert found.is_tie
    assert found.faster is None


def test_different_questions_are_not_ranked():
    first = make_run("t-1", 1000.0)
    second = make_run(
        "t-2", 2000.0, workload=make_workload("llama"), cluster=make_cluster(nodes=2), versions={"torch": "9"}
    )
    found = compare(first, second)
    assert not found.is_comparable
    assert found.faster is None
    assert found.cluster == {"nodes": (1, 2)}
    assert [note.split(":")[0] for note in found.notes] == [
        "different workloads (model)",
        "different clusters (nodes)",
        "different versions (python, torch, zerotune)",
    ]


def test_a_run_without_a_measurement():
    found = compare(make_run("t-1", 1000.0), make_run("t-2", None))
    assert found.faster is None
    assert found.throughput is None
    assert found.notes == ("t-2 was not measured: oom_device",)

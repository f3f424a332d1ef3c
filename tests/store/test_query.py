"""Ranking, the front, and what a launch takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import MIB, make_cluster, make_run, make_study, make_workload
from zerotune.records import RunKind, RunRecord, Status
from zerotune.store.query import best_for, group, is_candidate, pareto, rank, winners
from zerotune.store.store import Store


@st.composite
def some_runs(draw: st.DrawFn, workloads: int = 1) -> list[RunRecord]:
    number = draw(st.integers(0, 12))
    return [
        make_run(
            f"t-{index:08x}",
            draw(st.none() | st.integers(900, 1100).map(float)),
            peak_memory_bytes=draw(st.integers(100, 108)) * MIB,
            spread=draw(st.sampled_from([0.0, 0.01, 0.05])),
            feasible=draw(st.sampled_from([None, True, False])),
            number=index,
            study=draw(st.sampled_from(["a", "b", None])),
            workload=make_workload(str(draw(st.integers(1, workloads)))),
        )
        for index in range(number)
    ]


def speed(run: RunRecord) -> float:
    assert run.measurement is not None
    return run.measurement.tokens_per_second.value


def peak(run: RunRecord) -> int:
    assert run.measurement is not None
    return run.measurement.peak_memory_bytes


@given(some_runs(), st.randoms())
def test_the_order_does_not_depend_on_the_input(runs, random):
    confirmed = {run.run_id for run in random.sample(runs, min(2, len(runs)))}
    shuffled = random.sample(runs, len(runs))
    assert rank(runs, confirmed) == rank(shuffled, confirmed)


@given(some_runs())
def test_every_candidate_has_one_place_and_nobody_else(runs):
    ranked = rank(runs)
    assert [each.rank for each in ranked] == list(range(1, len(ranked) + 1))
    assert {each.run.run_id for each in ranked} == {run.run_id for run in runs if is_candidate(run)}
    assert all(each.run.feasible is not False and each.run.measurement for each in ranked)


@given(some_runs())
def test_whoever_is_clearly_faster_goes_first(runs):
    ordered = [each.run for each in rank(runs)]
    for place, ahead in enumerate(ordered):
        for behind in ordered[place + 1 :]:
            a, b = ahead.measurement.tokens_per_second, behind.measurement.tokens_per_second
            if not a.overlaps(b):
                # Both may sit in one tie with somebody faster than either; then memory has decided.
                tied = any(
                    c.overlaps(a) and c.overlaps(b) and c.value >= max(a.value, b.value)
                    for c in (run.measurement.tokens_per_second for run in ordered)
                )
                assert a.value > b.value or (tied and peak(ahead) <= peak(behind))


@given(some_runs())
def test_by_memory_the_smallest_peak_goes_first(runs):
    peaks = [peak(each.run) for each in rank(runs, sort="memory")]
    assert peaks == sorted(peaks)


@given(some_runs())
def test_the_front_is_exactly_what_nobody_dominates(runs):
    candidates = [run for run in runs if is_candidate(run)]

    def dominates(a, b):
        better = speed(a) > speed(b) or peak(a) < peak(b)
        return better and speed(a) >= speed(b) and peak(a) <= peak(b)

    expected = {run.run_id for run in candidates if not any(dominates(other, run) for other in candidates)}
    assert {run.run_id for run in pareto(runs)} == expected
    assert {each.run.run_id for each in rank(runs) if each.pareto} == expected


@given(some_runs(workloads=3))
def test_workloads_are_never_mixed(runs):
    groups = group(runs)
    for each in groups:
        assert {run.workload.key for run in each.runs} == {each.workload.key}
        rank(each.runs)
    assert sum(len(each.runs) for each in groups) == len(runs)
    if len(groups) > 1:
        with pytest.raises(ValueError, match="cannot be ranked together"):
            rank(runs)


def test_a_tie_goes_to_the_smaller_peak():
    fast = make_run("t-1", 1000.0, spread=0.02, peak_memory_bytes=300 * MIB)
    lean = make_run("t-2", 990.0, spread=0.02, peak_memory_bytes=200 * MIB)
    slow = make_run("t-3", 800.0, spread=0.02, peak_memory_bytes=100 * MIB)
    ranked = rank([fast, lean, slow])
    assert [each.run.run_id for each in ranked] == ["t-2", "t-1", "t-3"]
    assert [each.is_tied for each in ranked] == [True, True, False]
    assert [each.pareto for each in ranked] == [True, True, True]


def test_a_confirmed_run_goes_before_its_own_study_only():
    runs = [
        make_run("t-1", 1300.0, study="a"),
        make_run("t-2", 1200.0, study="b"),
        make_run("t-3", 1100.0, study="b"),
        make_run("t-4", 1000.0, study="a"),
    ]
    assert [each.run.run_id for each in rank(runs, {"t-3"})] == ["t-1", "t-3", "t-2", "t-4"]


def test_a_study_by_memory_does_not_decide_the_order_of_speed():
    studies = [make_study("a", objective="memory", best="t-1"), make_study("b", best="t-2")]
    assert winners(studies, "throughput") == {"t-2"}
    assert winners(studies, "memory") == {"t-1"}
    assert winners(studies) == {"t-1", "t-2"}


def test_failed_runs_of_every_kind_are_no_candidates():
    for status in Status:
        if status is not Status.COMPLETE:
            assert rank([make_run(tokens_per_second=None, status=status)]) == []
    assert rank([]) == []


class TestBestFor:
    @pytest.fixture
    def store(self, tmp_path: Path):
        with Store.open(f"sqlite:///{tmp_path}/zerotune.db") as store:
            yield store

    def test_nothing_known(self, store):
        store.add_run(make_run("t-1", workload=make_workload("other")))
        store.add_run(make_run("t-2", None))
        assert best_for(store, make_workload(), make_cluster()) is None

    def test_the_best_here(self, store):
        store.add_run(make_run("t-1", 1000.0))
        store.add_run(make_run("t-2", 2000.0))
        store.add_run(make_run("t-3", 3000.0, feasible=False))
        store.add_run(make_run("t-4", 4000.0, cluster=make_cluster(nodes=2)))
        store.add_run(make_run("l-5", 5000.0, kind=RunKind.LAUNCH))
        choice = best_for(store, make_workload(), make_cluster())
        assert choice is not None
        assert choice.run.run_id == "t-2"
        assert choice.reason == "the best of 2 trials of study demo"
        assert choice.caveat is None

    def test_the_confirmed_one_before_a_higher_number(self, store):
        store.add_study(make_study(best="t-1"))
        store.add_run(make_run("t-1", 1000.0))
        store.add_run(make_run("t-2", 2000.0))
        choice = best_for(store, make_workload(), make_cluster())
        assert choice is not None
        assert (choice.run.run_id, choice.reason) == (
            "t-1",
            "confirmed as the best of 2 trials of study demo",
        )

    def test_the_nearest_cluster_with_a_caveat(self, store):
        store.add_run(make_run("t-1", 1000.0, cluster=make_cluster(nodes=1)))
        store.add_run(make_run("t-2", 9000.0, cluster=make_cluster(nodes=8)))
        store.add_run(make_run("t-3", 9000.0, cluster=make_cluster(nodes=2, device="H200")))
        choice = best_for(store, make_workload(), make_cluster(nodes=2))
        assert choice is not None
        assert choice.run.run_id == "t-1"
        assert choice.caveat == "measured on 1 node, not 2"

    def test_a_budget_excludes(self, store):
        store.add_run(make_run("t-1", 2000.0, peak_memory_bytes=300 * MIB))
        store.add_run(make_run("t-2", 1000.0, peak_memory_bytes=100 * MIB))
        choice = best_for(store, make_workload(), make_cluster(), memory_budget=200 * MIB)
        assert choice is not None
        assert choice.run.run_id == "t-2"

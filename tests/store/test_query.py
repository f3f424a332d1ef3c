"""Ranking, the front, and what a launch takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import MIB, make_cluster, make_confirmed, make_run, make_study, make_workload
from zerotune.records import RunKind, RunRecord, Status, StudyRecord
from zerotune.store.query import best_for, group, is_candidate, pareto, rank
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


@st.composite
def some_studies(draw: st.DrawFn, runs: list[RunRecord]) -> list[StudyRecord]:
    """Studies that confirmed some of their runs, the first of them being the reference."""
    studies = []
    for name in ("a", "b"):
        own = [run.run_id for run in runs if run.study == name and is_candidate(run)]
        chosen = draw(st.lists(st.sampled_from(own), unique=True, max_size=4)) if own else []
        confirmed = [
            make_confirmed(
                run_id,
                draw(st.integers(95, 110)) / 100 if place else 1.0,
                spread=draw(st.sampled_from([0.01, 0.03])) if place else 0.0,
            )
            for place, run_id in enumerate(chosen)
        ]
        best = chosen[0] if chosen else None
        objective = draw(st.sampled_from(["throughput", "memory", "pareto"]))
        studies.append(make_study(name, objective=objective, best=best, confirmed=confirmed))
    return studies


def speed(run: RunRecord) -> float:
    assert run.measurement is not None
    return run.measurement.tokens_per_second.value


def peak(run: RunRecord) -> int:
    assert run.measurement is not None
    return run.measurement.peak_memory_bytes


@given(st.data(), st.randoms(), st.sampled_from(["throughput", "memory", None]))
def test_the_order_does_not_depend_on_the_input(data, random, sort):
    runs = data.draw(some_runs())
    studies = data.draw(some_studies(runs))
    shuffled = random.sample(runs, len(runs))
    assert rank(runs, studies, sort) == rank(shuffled, studies, sort)
    assert {each.run.run_id for each in rank(runs, studies, sort)} == {
        run.run_id for run in runs if is_candidate(run)
    }


@given(st.data())
def test_in_turns_goes_by_the_paired_ratio_and_before_what_was_not_measured_again(data):
    runs = [run for run in data.draw(some_runs()) if run.study == "a"]
    study = data.draw(some_studies(runs))[0].model_copy(update={"objective": "throughput"})
    confirmed = {each.run_id: each for each in study.confirmed}
    order = [each.run for each in rank(runs, [study])]
    in_turns = [run for run in order if run.run_id in confirmed]
    for place, ahead in enumerate(in_turns):
        for behind in in_turns[place + 1 :]:
            a, b = (confirmed[run.run_id].speedup for run in (ahead, behind))
            assert a.value >= b.value or peak(ahead) <= peak(behind), "only memory may overrule speed"
    contenders = [run for run in in_turns if not confirmed[run.run_id].is_reference]
    assert order[: len(contenders)] == contenders or order[: len(in_turns)] == in_turns
    front = [each.run for each in rank(runs, [study]) if each.pareto]
    assert not in_turns or order[0] in front


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


def ids(ranked) -> list[str]:
    return [each.run.run_id for each in ranked]


def in_turns(ratios: dict[str, float], spread: float = 0.04, **fields) -> StudyRecord:
    """A study with paired ratios; the reference is the one with exactly 1."""
    confirmed = [
        make_confirmed(run_id, ratio, 0.0 if ratio == 1 else spread) for run_id, ratio in ratios.items()
    ]
    return make_study(**({"best": confirmed[0].run_id, "confirmed": confirmed} | fields))


class TestInTurns:
    def runs(self) -> list[RunRecord]:
        """The trials alone have b far ahead of the baseline a; in turns it turns out to be slower."""
        return [
            make_run("a", 2800.0, is_baseline=True, peak_memory_bytes=64 * MIB),
            make_run("b", 3500.0, peak_memory_bytes=61 * MIB),
            make_run("c", 3100.0, peak_memory_bytes=61 * MIB),
            make_run("d", 2900.0, peak_memory_bytes=50 * MIB),
            make_run("e", 2700.0, peak_memory_bytes=40 * MIB),
        ]

    def test_paired_ratios_rank_what_was_measured_in_turns(self):
        ranked = rank(self.runs(), [in_turns({"a": 1.0, "b": 0.9, "c": 0.8})])
        assert ids(ranked) == ["a", "b", "c", "d", "e"]
        assert [each.is_winner for each in ranked] == [True, False, False, False, False]
        assert [each.pareto for each in ranked] == [True, True, False, True, True]

    def test_a_tie_in_turns_goes_to_the_smaller_peak(self):
        ranked = rank(self.runs(), [in_turns({"b": 0.98, "a": 1.0, "c": 0.8})])
        assert ids(ranked)[:3] == ["b", "a", "c"]
        assert [each.is_tied for each in ranked[:3]] == [True, True, False]

    def test_a_reference_that_all_others_beat_stands_among_the_unconfirmed(self):
        """It was measured again whatever its speed, so that others may well be faster."""
        ranked = rank(self.runs(), [in_turns({"c": 1.3, "b": 1.2, "a": 1.0})])
        assert ids(ranked) == ["c", "b", "d", "a", "e"]

    def test_by_memory_the_ratio_breaks_ties_only(self):
        study = in_turns({"c": 1.0, "b": 0.8}, objective="memory")
        assert ids(rank(self.runs()[1:3], [study], "memory")) == ["c", "b"]
        assert ids(rank(self.runs(), [study], "memory"))[-1] == "a"

    def test_a_study_by_memory_does_not_decide_the_order_of_speed(self):
        study = in_turns({"e": 0.9, "a": 1.0}, objective="memory")
        assert ids(rank(self.runs(), [study])) == ["b", "c", "d", "a", "e"]
        assert not any(each.is_winner for each in rank(self.runs(), [study]))
        assert ids(rank(self.runs(), [study], sort=None))[0] == "e"
        assert rank(self.runs(), [study], "memory")[0].is_winner

    def test_it_decides_within_its_own_study_only(self):
        runs = [
            make_run("t-1", 1300.0, study="a"),
            make_run("t-2", 1200.0, study="b"),
            make_run("t-3", 1100.0, study="b"),
            make_run("t-4", 1000.0, study="a"),
        ]
        study = in_turns({"t-3": 1.2, "t-2": 1.0}, name="b")
        assert ids(rank(runs, [study])) == ["t-1", "t-3", "t-2", "t-4"]
        assert ids(rank(runs, [make_study("b", best="t-3")])) == ["t-1", "t-3", "t-2", "t-4"]


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

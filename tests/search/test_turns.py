"""One knob at a time, then together: which points are tried before the sampler has a say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import MIB
from tests.search.conftest import QUICK, SIZES, Bench, make_job, plan_of
from tests.search.fakes import Point, fail
from zerotune.config.schema import JobConfig
from zerotune.config.space import load_space
from zerotune.records import Status
from zerotune.records.events import TrialStarted
from zerotune.search.configuration import changes
from zerotune.search.turns import nothing_turned, one_knob_turned

BLOCK = 1_000_000

WIDE = """
knobs:
  prefetch_distance: {relative_to: block, values: [0, 4, 8]}
  release: [after_use, reuse, keep]
  max_reuse_distance: {relative_to: model, values: [0.5, 1], when: {release: reuse}}
  reduce_bucket_size: {relative_to: block, values: [1, 2, 4]}
  overlap_comm: [true, false]
"""


def far_and_kept(job: JobConfig) -> Point:
    """``keep`` and a long distance are faster; large buckets and no overlap are slower."""
    zero = job.zero
    step = 1.0 - 0.1 * (zero.release == "keep") - 0.05 * (zero.prefetch_distance > 4 * BLOCK)
    step += 0.02 * (zero.reduce_bucket_size > BLOCK) + 0.3 * (not zero.overlap_comm)
    return Point(step, 100 * MIB + 40 * MIB * (zero.release == "keep"))


def sources(bench: Bench) -> list[str]:
    return [event.source for event in bench.events if isinstance(event, TrialStarted)]


def test_each_knob_is_turned_by_itself_and_what_helped_is_put_together(bench: Bench) -> None:
    result, workers = bench(plan_of(make_job(trials=8), WIDE), far_and_kept)
    assert sources(bench)[:6] == ["baseline", *["one knob"] * 4, "combined"]
    baseline = workers.trials[0]
    assert [changes(job, baseline) for job in workers.trials[1:6]] == [
        {"release": "keep"},
        {"prefetch_distance": "8000000"},
        {"reduce_bucket_size": "4000000"},
        {"overlap_comm": "false"},
        {"release": "keep", "prefetch_distance": "8000000"},
    ]
    assert result.best.trial_number == 5  # the best there is


def test_turns_take_half_of_the_trials_and_those_that_matter_most_come_first(bench: Bench) -> None:
    bench(plan_of(make_job(trials=4), WIDE), far_and_kept)
    assert sources(bench) == ["baseline", "one knob", "one knob", "combined"]


def test_what_does_not_fit_is_not_put_together(bench: Bench) -> None:
    plan = plan_of(make_job(trials=8, memory_budget=120 * MIB), WIDE)
    result, _ = bench(plan, far_and_kept)
    assert "combined" not in sources(bench)  # one knob helped, and fits
    assert result.best.config.zero.release == "after_use"


def test_a_longer_search_goes_on_with_the_knobs_that_were_left(bench: Bench) -> None:
    bench(plan_of(make_job(trials=4), WIDE), far_and_kept)
    bench.events.clear()
    bench(plan_of(make_job(trials=8), WIDE), far_and_kept)
    assert sources(bench)[:2] == ["one knob", "one knob"]


def test_the_random_sampler_is_left_alone(bench: Bench) -> None:
    bench(plan_of(make_job(trials=6, sampler="random"), WIDE), far_and_kept)
    assert set(sources(bench)) == {"baseline", "sampler"}


def test_there_is_nothing_to_turn_from_defaults_that_do_not_fit(bench: Bench) -> None:
    def no_defaults(job: JobConfig) -> Point:
        if job.zero.release == "after_use" and job.zero.prefetch_distance >= 4 * BLOCK:
            raise fail(Status.OOM_DEVICE)
        return far_and_kept(job)

    bench(plan_of(make_job(trials=6), WIDE), no_defaults)
    assert set(sources(bench)) <= {"baseline", "sampler", "random"}


@pytest.mark.parametrize("objective", ["throughput", "memory"])
@pytest.mark.parametrize("block", [1_000_000, 3_151_360, 12_594_176, 202_383_360])
@pytest.mark.parametrize("name", ["default", "quick", "memory"])
def test_turns_of_a_space_that_ships_turn_one_knob_each(name: str, block: int, objective: str) -> None:
    """Whether the defaults are a point of the space or not."""
    job = make_job(trials=40, micro=4, objective=objective)
    plan = replace(plan_of(job, load_space(name)), sizes=replace(SIZES, block=block))
    start = nothing_turned(plan).job
    assert changes(start, plan.baseline).keys() == ({"prefetch_distance"} if name == "memory" else set())
    assert plan.choices_of(start) is not None
    told = []
    for turn in one_knob_turned(plan):
        (knob,) = set(changes(turn.job, start)) - {"max_reuse_distance"}
        told.append(knob)
        assert plan.choices_of(turn.job) is not None, "the sampler learns from it"
    assert sorted(told) == sorted(dimension.name for dimension in plan.space if not dimension.when)


def test_what_the_file_sets_beside_the_space_stays_in_every_turn(bench: Bench) -> None:
    """The defaults would be another comparison: nothing but the knob may differ."""
    job = make_job(trials=8, zero={"overlap_comm": False, "prefetch_distance": BLOCK})
    _, workers = bench(plan_of(job, QUICK), far_and_kept)
    assert sources(bench)[:6] == ["baseline", "file", "start", "one knob", "one knob", "one knob"]
    _, own, start, *turns = workers.trials[:6]
    assert changes(own, start) == {"prefetch_distance": "1000000"}
    assert [len(changes(turn, start)) for turn in turns] == [1, 1, 1]
    assert not any(turn.zero.overlap_comm for turn in turns)


def test_planned_is_turned_to_with_the_budget_of_the_file(bench: Bench) -> None:
    space = (
        "knobs:\n  release: [after_use, planned]\n  prefetch_distance: {relative_to: block, values: [0, 4]}\n"
    )
    _, workers = bench(plan_of(make_job(trials=4, zero={"memory_budget": 300 * MIB}), space), far_and_kept)
    assert [job.zero.memory_budget for job in workers.trials if job.zero.release == "planned"] == [
        300 * MIB
    ] * 2


def test_a_distance_alone_in_a_space_is_turned_beside_the_release_of_the_file(bench: Bench) -> None:
    space = (
        "knobs:\n  max_reuse_distance: {relative_to: block, values: [1, 2]}\n  overlap_comm: [true, false]\n"
    )
    job = make_job(trials=4, zero={"release": "reuse", "max_reuse_distance": BLOCK})
    _, workers = bench(plan_of(job, space), far_and_kept)
    assert [job.zero.release for job in workers.trials] == ["after_use", *["reuse"] * 4][
        : len(workers.trials)
    ]


def test_a_search_for_memory_turns_sizes_down(bench: Bench) -> None:
    _, workers = bench(plan_of(make_job(trials=8, objective="memory"), WIDE), far_and_kept)
    turns = [changes(job, workers.trials[0]) for job in workers.trials[1:5]]
    assert {"prefetch_distance": "0"} in turns and {"reduce_bucket_size": "4000000"} in turns


def test_a_knob_that_two_others_give_a_meaning_does_not_hold_up_the_search(bench: Bench) -> None:
    space = """
knobs:
  release: [after_use, keep]
  overlap_comm: [false, true]
  backward_prefetch_distance: {relative_to: block, low: 0, high: 8, when: {release: keep, overlap_comm: true}}
"""

    def kept_beside(job: JobConfig) -> Point:
        return Point(1.0 - 0.1 * (job.zero.release == "keep") + 0.01 * job.zero.overlap_comm)

    bench(plan_of(make_job(trials=7), space), kept_beside)
    assert sources(bench).count("combined") <= 1


@given(
    prefetch=st.sampled_from([0, 1, 2, 4]),
    release=st.sampled_from(["after_use", "keep"]),
    reduce=st.sampled_from([1, 4]),
    shift=st.integers(-400_000, 400_000),
)
def test_the_nearest_point_is_the_one_with_the_nearest_sizes(
    prefetch: int, release: str, reduce: int, shift: int
) -> None:
    plan = plan_of(make_job(), QUICK)
    point = {"prefetch_distance": prefetch, "release": release, "reduce_bucket_size": reduce}
    job = plan.configure(point)
    moved = job.with_knobs({"reduce_bucket_size": reduce * BLOCK + shift})
    assert plan.nearest(job) == plan.nearest(moved) == point

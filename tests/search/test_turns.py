"""One knob at a time, then together: which points are tried before the sampler has a say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import MIB
from tests.search.conftest import QUICK, Bench, make_job, plan_of
from tests.search.fakes import Point, fail
from zerotune.config.schema import JobConfig
from zerotune.config.space import load_space
from zerotune.records import Status
from zerotune.records.events import TrialStarted
from zerotune.search.configuration import changes
from zerotune.search.plan import SearchPlan
from zerotune.search.turns import turned_from_defaults

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


def free_knobs(plan: SearchPlan) -> set[str]:
    return {
        dimension.name
        for dimension in plan.space
        if not dimension.when and dimension.values and len(dimension.values) > 1
    }


@pytest.mark.parametrize("name", ["default", "quick", "memory"])
def test_turns_of_a_space_that_ships_turn_one_knob_each(name: str) -> None:
    """The defaults are no point of ``memory``: turns start from the one next to them."""
    plan = plan_of(make_job(trials=40, global_batch=8, micro=4), load_space(name))
    start = plan.nearest(plan.baseline)
    turned = []
    for choices in turned_from_defaults(plan):
        differing = {knob for knob, value in choices.items() if start.get(knob) != value}
        turned += [knob for knob in differing if not plan.space[knob].when]
        assert len([knob for knob in differing if not plan.space[knob].when]) == 1
    assert sorted(turned) == sorted(free_knobs(plan))


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

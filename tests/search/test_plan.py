from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import make_cluster, make_workload
from tests.search.conftest import SIZES, make_job, plan_of
from zerotune.config.errors import UsageError
from zerotune.config.space import list_spaces, load_space
from zerotune.search.configuration import acting_knobs, canonical_key, changes
from zerotune.search.dimensions import draw, enumerate_all, to_parameters
from zerotune.search.plan import SearchPlan, make_plan

RANGES = """
knobs:
  release: [after_use, reuse, keep]
  max_reuse_distance: {relative_to: model, low: 0.1, high: 1, when: {release: reuse}}
  prefetch_distance: {relative_to: block, low: 0, high: 4}
  reduce_bucket_size: {low: 1000, high: 8000000, log: true}
  micro_batch_size: [1, 2, 4]
"""


def named(name: str) -> SearchPlan:
    return make_plan(make_job(), load_space(name), SIZES, 2, make_workload(), make_cluster())


PLANS = {name: named(name) for name in list_spaces()} | {"ranges": plan_of(make_job(), RANGES)}


@pytest.mark.parametrize("name", PLANS)
@given(seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_every_point_is_a_configuration_that_can_run_and_be_found_again(name: str, seed: int) -> None:
    plan = PLANS[name]
    choices = draw(random.Random(seed), plan.space.dimensions)
    job = plan.configure(choices)
    assert job.zero.is_resolved
    assert job.train.micro_batch_size is not None
    assert job.train.global_batch_size % (job.train.micro_batch_size * plan.ranks) == 0
    found = plan.choices_of(job)
    assert found is not None
    assert canonical_key(plan.configure(found)) == canonical_key(job)


@pytest.mark.parametrize("name", ["default", "quick"])
def test_the_defaults_are_a_point_of_the_usual_spaces(name: str) -> None:
    """So that the sampler learns from the baseline, too."""
    plan = PLANS[name]
    assert plan.choices_of(plan.baseline) is not None


@pytest.mark.parametrize("name", list_spaces())
def test_spaces_that_ship_can_be_listed_and_hold_enough(name: str) -> None:
    points = enumerate_all(PLANS[name].space.dimensions)
    assert points is not None
    assert len({canonical_key(PLANS[name].configure(choices)) for choices in islice(points, 300)}) >= 12


def test_a_space_with_a_range_cannot_be_listed() -> None:
    assert enumerate_all(PLANS["ranges"].space.dimensions) is None


def test_conditional_knobs_are_left_out_where_they_mean_nothing() -> None:
    points = enumerate_all(load_space("default").dimensions)
    assert points is not None
    for choices in islice(points, 500):
        assert ("max_reuse_distance" in choices) == (choices["release"] == "reuse")


def test_numbers_in_order_are_told_by_their_place() -> None:
    dimensions = load_space("default").dimensions
    parameters = to_parameters({"prefetch_distance": 4, "release": "keep", "overlap_comm": False}, dimensions)
    assert parameters == {"prefetch_distance": 3, "release": "keep", "overlap_comm": False}


def test_micro_batches_that_do_not_divide_are_left_out_and_named() -> None:
    plan = plan_of(make_job(global_batch=12), "knobs:\n  micro_batch_size: [1, 2, 4, 5, 6]\n")
    assert plan.space["micro_batch_size"].values == (1, 2, 6)
    assert "4, 5 left out" in plan.notes[0]
    with pytest.raises(UsageError, match="use one of 1, 2, 3, 6"):
        plan_of(make_job(global_batch=12), "knobs:\n  micro_batch_size: [4, 5]\n")


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="does not divide over 3 ranks"):
        plan_of(make_job(global_batch=8), ranks=3)


def test_knobs_that_do_nothing_do_not_tell_configurations_apart() -> None:
    plan = PLANS["ranges"]
    keep = plan.configure({"release": "keep", "prefetch_distance": 4.0})
    assert "max_reuse_distance" not in acting_knobs(keep)
    plain = plan.resolve(keep.with_knobs({"stage": 0}), 4)
    other = plan.resolve(keep.with_knobs({"stage": 0, "prefetch_distance": 5}), 4)
    assert canonical_key(plain) == canonical_key(other)
    assert changes(keep, plan.baseline) == {"release": "keep"}


def test_a_distance_of_backward_that_follows_is_not_named() -> None:
    plan = PLANS["ranges"]
    near = plan.configure({"prefetch_distance": 1.0})
    assert near.zero.backward_prefetch_distance == near.zero.prefetch_distance
    assert set(changes(near, plan.baseline)) == {"prefetch_distance"}
    apart = plan.resolve(near.with_knobs({"backward_prefetch_distance": 7}), 4)
    assert set(changes(apart, plan.baseline)) == {"prefetch_distance", "backward_prefetch_distance"}


def test_knobs_of_the_train_section_are_searched_and_told_apart() -> None:
    space = "knobs:\n  activation_checkpointing: [none, full]\n  accumulate: [reduce, local]\n"
    plan = plan_of(make_job(), space)
    both = plan.configure({"activation_checkpointing": "full", "accumulate": "local"})
    assert changes(both, plan.baseline) == {"activation_checkpointing": "full", "accumulate": "local"}
    assert plan.choices_of(both) == {"activation_checkpointing": "full", "accumulate": "local"}
    first = plan.configure({"activation_checkpointing": "none", "accumulate": "local"})
    assert "accumulate" not in acting_knobs(first.with_knobs({"stage": 1}))


def test_recomputation_is_left_out_for_a_model_without_blocks() -> None:
    sizes = replace(SIZES, has_blocks=False)
    plan = make_plan(make_job(), load_space("memory"), sizes, 2, make_workload(), make_cluster())
    assert "activation_checkpointing" not in plan.space
    assert "activation_checkpointing left out" in plan.notes[0]


def test_planned_takes_the_searchs_budget_and_is_left_out_without_one() -> None:
    space = "knobs:\n  release: [after_use, planned]\n"
    plan = plan_of(make_job(), space)
    assert plan.space["release"].values == ("after_use",)
    assert plan.notes == ("release planned left out: there is no memory budget",)
    job = make_job()
    budget = job.search.model_copy(update={"memory_budget": 5 * 2**30})
    plan = plan_of(job.model_copy(update={"search": budget}), space)
    assert plan.configure({"release": "planned"}).zero.memory_budget == 5 * 2**30
    assert plan.configure({"release": "after_use"}).zero.memory_budget is None
    with pytest.raises(UsageError, match="no other release than planned"):
        plan_of(make_job(), "knobs:\n  release: [planned]\n")


def test_the_baseline_is_the_defaults_with_the_files_micro_batch() -> None:
    plan = plan_of(make_job(micro=2, zero={"release": "keep"}))
    assert plan.baseline.zero.release == "after_use" and plan.baseline.train.micro_batch_size == 2
    assert plan.from_file is not None and plan.from_file.zero.release == "keep"
    assert plan_of(make_job(zero={"prefetch_distance": 4_000_000})).from_file is None

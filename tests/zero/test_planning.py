"""``release: planned``: the choice is made after the same step on every rank, and never changes bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.zero.planning import GENEROUS, Trained, full_at_peak, train, train_by_hand
from zerotune.config.errors import UsageError
from zerotune.config.knobs import Knobs
from zerotune.schedule import ReleasePlan
from zerotune.zero.planning import MOST_IRREGULAR, SETTLING_STEPS, plans_release

LIMIT_S = 150.0


def planned(budget: int, **knobs: Any) -> dict[str, Any]:
    return {"release": "planned", "memory_budget": budget, "prefetch_distance": 6000} | knobs


def assert_same_bits(one: list[Trained], other: list[Trained]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.losses == theirs.losses
        assert mine.state.keys() == theirs.state.keys()
        for name, value in mine.state.items():
            assert torch.equal(value, theirs.state[name]), name


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bits_are_those_of_after_use_over_the_change(ranks: int) -> None:
    plain = run_on_ranks(ranks, train, {"prefetch_distance": 6000}, limit=LIMIT_S)
    found = run_on_ranks(ranks, train, planned(GENEROUS), limit=LIMIT_S)
    assert_same_bits(found, plain)
    assert len({one.plan for one in found}) == 1
    for one in found:
        assert one.is_settled and one.live_after_flush == 0
        assert one.live[-1] == one.peak_live
    assert [len(one.lines) for one in found] == [int(ranks > 1)] + [0] * (ranks - 1)
    assert ranks == 1 or "predicted" in found[0].lines[0]


@pytest.mark.parametrize("room", [0, 20_000, 60_000])
def test_a_budget_is_kept(room: int) -> None:
    plain = run_on_ranks(2, train, {"prefetch_distance": 0}, limit=LIMIT_S)
    peak = max(one.peak for one in plain)
    found = run_on_ranks(2, train, planned(peak + room, prefetch_distance=0), limit=LIMIT_S)
    assert_same_bits(found, plain)
    assert len({one.plan for one in found}) == 1 and all(one.is_settled for one in found)
    assert max(one.peak for one in found) <= peak + room


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "plan", [ReleasePlan(), ReleasePlan(kept=frozenset(range(8)))], ids=["released", "kept"]
)
@pytest.mark.parametrize("bucket", [1, 20_000], ids=["alone", "together"])
def test_what_full_parameters_take_is_predicted_to_the_byte(
    ranks: int, plan: ReleasePlan, bucket: int
) -> None:
    """A unit under way has a buffer for the other ranks' rows alone: less than a complete one."""
    knobs = {"prefetch_distance": 20_000, "allgather_bucket_size": bucket}
    for counted, predicted in run_on_ranks(ranks, full_at_peak, knobs, plan, limit=LIMIT_S):
        assert counted == predicted


def test_a_budget_that_cannot_be_met_is_said_in_one_line() -> None:
    plain = run_on_ranks(2, train, {}, limit=LIMIT_S)
    found = run_on_ranks(2, train, planned(1000), limit=LIMIT_S)
    assert_same_bits(found, run_on_ranks(2, train, {"prefetch_distance": 6000}, limit=LIMIT_S))
    assert [one.plan for one in found] == [ReleasePlan()] * 2
    assert len(found[0].lines) == 1 and "cannot be met" in found[0].lines[0] and not found[1].lines
    assert plain[0].plan == ReleasePlan()


def test_micro_batches_and_tied_weights() -> None:
    common = {"model": "tied_gpt", "accumulation": 3}
    plain = run_on_ranks(2, _train_with, {"prefetch_distance": 6000}, common, limit=LIMIT_S)
    found = run_on_ranks(2, _train_with, planned(GENEROUS), common, limit=LIMIT_S)
    assert_same_bits(found, plain)
    assert found[0].is_settled and found[0].plan == found[1].plan != ReleasePlan()


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"accumulate": "local"}])
def test_precision_and_accumulation(settings: dict[str, Any]) -> None:
    common = {"accumulation": 2, **settings}
    plain = run_on_ranks(2, _train_with, {"prefetch_distance": 6000}, common, limit=LIMIT_S)
    found = run_on_ranks(2, _train_with, planned(GENEROUS), common, limit=LIMIT_S)
    assert_same_bits(found, plain)
    assert found[0].is_settled


def test_steps_that_differ_are_no_example() -> None:
    """Evaluations in between put the choice off; the same ones on every rank, and bits stay."""
    common = {"irregular": (3, 5, 6), "steps": 24}
    plain = run_on_ranks(2, _train_with, {"prefetch_distance": 6000}, common, limit=LIMIT_S)
    found = run_on_ranks(2, _train_with, planned(GENEROUS), common, limit=LIMIT_S)
    assert_same_bits(found, plain)
    assert found[0].is_settled and found[0].plan == found[1].plan


def test_steps_that_never_run_alike_leave_everything_released() -> None:
    steps = MOST_IRREGULAR + 4
    common = {"irregular": tuple(range(2, steps)), "steps": steps}
    found = run_on_ranks(2, _train_with, planned(GENEROUS), common, limit=LIMIT_S)
    assert [one.is_settled for one in found] == [True, True]
    assert [one.plan for one in found] == [ReleasePlan()] * 2
    assert len(found[0].lines) == 1 and "do not run alike" in found[0].lines[0]


def test_everything_is_settled_when_the_engine_says_so() -> None:
    found = run_on_ranks(2, _train_with, planned(GENEROUS), {"steps": SETTLING_STEPS}, limit=LIMIT_S)
    assert all(one.is_settled for one in found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_units_that_persist_for_some_steps_change_no_bits(precision: str) -> None:
    plans = {
        1: ReleasePlan(persistent=frozenset({1, 2}), kept=frozenset({3})),
        3: ReleasePlan(persistent=frozenset({2, 4}), reuse_distance=9000),
        5: ReleasePlan(kept=frozenset({0, 1, 2, 3})),
    }
    plain = run_on_ranks(2, train_by_hand, {}, precision, limit=LIMIT_S)
    found = run_on_ranks(2, train_by_hand, plans, precision, limit=LIMIT_S)
    assert_same_bits(found, plain)
    for one in found:
        assert one.live[1:] == [0] * 7, "live elements are the schedule's own"
        assert one.peak == 0, "nothing stays full after the last plan"


def test_planned_without_a_budget_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a memory_budget"):
        plans_release(Knobs(release="planned"))
    assert plans_release(Knobs(release="planned", memory_budget=1))
    assert not plans_release(Knobs(release="planned", stage=2))
    assert not plans_release(Knobs())


def _train_with(rank: int, size: int, knobs: dict[str, Any], settings: dict[str, Any]) -> Trained:
    return train(rank, size, knobs, **settings)

"""The engine trains what a plain single process trains: losses, norms and parameters after 50 steps, to 1e-5."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.zero.jobs import Case, Outcome, combinations, largest_difference, train_engine, train_plain
from tests.zero.settings import random_settings

TOLERANCE = 1e-5
SETTINGS = random_settings(5)
COMBINATIONS = combinations()

HALF = (0, 3, 5, 6)
"""Half of the combinations, in which every two settings of optimizer, clipping and accumulation meet."""

CASES = [
    pytest.param(number, ranks, marks=() if ranks == 2 or number in HALF else pytest.mark.matrix)
    for number in range(len(COMBINATIONS))
    for ranks in (1, 2, 3)
]
"""All combinations on 2 ranks, and half of them on 1 and 3; the other half with ``make matrix``."""


def assert_parity(outcomes: list[Outcome], case: Case) -> None:
    plain = train_plain(case)
    for rank, outcome in enumerate(outcomes):
        assert outcome.losses == pytest.approx(plain.losses, abs=TOLERANCE), f"rank {rank}"
        assert outcome.norms == pytest.approx(plain.norms, rel=1e-4, abs=TOLERANCE), f"rank {rank}"
        difference, where = largest_difference(outcome.state, plain.state)
        assert difference < TOLERANCE, f"rank {rank}: {where} differs by {difference}"
        assert outcome.broadcasts_in_steps == 0
        assert outcome.live_after_flush == 0


@pytest.mark.parametrize(("number", "ranks"), CASES)
def test_stage_3_equals_the_plain_process(number: int, ranks: int) -> None:
    optimizer, clip, accumulation = COMBINATIONS[number]
    case = Case(
        optimizer=optimizer,
        clip=clip,
        accumulation=accumulation,
        knobs=SETTINGS[(number + ranks) % len(SETTINGS)],
    )
    outcomes = run_on_ranks(ranks, train_engine, case)
    assert_parity(outcomes, case)
    assert all((outcome.gathers > 0) is (ranks > 1) for outcome in outcomes)


@pytest.mark.parametrize(("number", "ranks"), CASES)
def test_stage_0_equals_the_plain_process(number: int, ranks: int) -> None:
    optimizer, clip, accumulation = COMBINATIONS[number]
    case = Case(optimizer=optimizer, clip=clip, accumulation=accumulation, knobs={"stage": 0})
    outcomes = run_on_ranks(ranks, train_engine, case)
    assert_parity(outcomes, case)
    assert all(outcome.gathers == 0 for outcome in outcomes)


@pytest.mark.parametrize("model", ["tied_gpt", "llama"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_other_models(model: str, ranks: int) -> None:
    for knobs in SETTINGS:
        case = Case(model=model, knobs=knobs, steps=6)
        outcomes = run_on_ranks(ranks, train_engine, case)
        assert_parity(outcomes, case)
        assert all(outcome.gathers > 0 for outcome in outcomes)


@pytest.mark.parametrize("ranks", [2, 3])
def test_persistent_parameters_are_refreshed(ranks: int) -> None:
    for threshold in (20, 1000, 10**9):
        case = Case(optimizer="adamw", knobs={"param_persistence_threshold": threshold}, steps=8)
        outcomes = run_on_ranks(ranks, train_engine, case)
        assert_parity(outcomes, case)
        assert all((outcome.gathers == 0) == (threshold == 10**9) for outcome in outcomes)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_knobs_do_not_change_a_bit(optimizer: str, clip: float | None) -> None:
    every = [{"stage": 0}, *SETTINGS, {"param_persistence_threshold": 500}, {}]
    outcomes = [
        run_on_ranks(2, train_engine, Case(optimizer=optimizer, clip=clip, knobs=knobs, steps=6))[0]
        for knobs in every
    ]
    for knobs, outcome in zip(every, outcomes, strict=True):
        assert outcome.losses == outcomes[0].losses, knobs
        assert outcome.norms == outcomes[0].norms, knobs
        for name, value in outcome.state.items():
            assert torch.equal(value, outcomes[0].state[name]), f"{name} with {knobs}"


def test_bf16_with_fp32_masters_learns_and_keeps_bits_over_knobs() -> None:
    every = [{"stage": 0}, SETTINGS[0], SETTINGS[1], {}]
    outcomes = [
        run_on_ranks(2, train_engine, Case(optimizer="adamw", knobs=knobs, steps=30, precision="bf16"))[0]
        for knobs in every
    ]
    plain = train_plain(Case(optimizer="adamw", steps=30))
    for outcome in outcomes:
        assert outcome.losses == outcomes[0].losses
        assert all(value.dtype is torch.float32 for value in outcome.state.values())
        assert outcome.losses[-1] == pytest.approx(plain.losses[-1], abs=0.05)
    assert outcomes[0].losses[-1] < outcomes[0].losses[0] - 0.5

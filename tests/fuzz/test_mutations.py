"""The fuzz check catches mistakes: each deliberate one fails within a small number of the examples it draws."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.jobs import Case, check
from tests.fuzz.mutations import MUTATIONS
from tests.fuzz.strategies import cases

ENOUGH = 60
"""Examples within which every mistake is caught; most need fewer than five."""


@functools.cache
def _examples() -> list[Case]:
    found: list[Case] = []

    @settings(
        max_examples=ENOUGH,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def _first_caught(mutation: str, examples: list[Case]) -> tuple[int, str]:
    for number, case in enumerate(examples, 1):
        try:
            check(case, mutation)
        except AssertionError as error:
            return number, str(error)
    return 0, ""


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_is_caught(mutation: str) -> None:
    number, why = _first_caught(mutation, _examples())
    print(f"{mutation}: example {number}: {why[:300]}")
    assert number, f"{mutation} passes {ENOUGH} examples"

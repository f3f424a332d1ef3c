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


KINDS = {
    "released_too_early": {"twice", "ref", "list", "tied", "borrow"},
    "released_while_recomputed": {"checkpoint"},
    "tied_reduced_per_user": {"tied"},
}
"""Nodes without which a mistake shows nowhere: examples that have none of them are passed over."""


def _concerns(mutation: str, case: Case) -> bool:
    kinds = KINDS.get(mutation)
    return case.ranks > 1 and (kinds is None or any(node.kind in kinds for node in case.model.body.walk()))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_is_caught(mutation: str) -> None:
    concerned = [case for case in _examples() if _concerns(mutation, case)]
    for number, case in enumerate(concerned, 1):
        try:
            check(case, mutation)
        except AssertionError as error:
            print(f"{mutation}: caught by example {number}: {str(error)[:200]}")
            check(case)  # and nothing but the mistake was wrong
            return
    pytest.fail(f"{mutation} passes {len(concerned)} examples")

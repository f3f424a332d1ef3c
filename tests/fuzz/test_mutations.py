"""The fuzz check catches mistakes: each deliberate one fails within a small number of the examples it draws."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.jobs import Case, check
from tests.fuzz.mutations import MUTATIONS
from tests.fuzz.strategies import chains, on_demand_cases, on_several_ranks, shared_and_recomputed

ENOUGH = 20
"""Examples within which every mistake is caught; most need fewer than five."""

CONCERNED = {
    "backward_exit_dropped": on_demand_cases(chains),
    "released_too_early": on_demand_cases(shared_and_recomputed),
    "released_while_recomputed": on_demand_cases(shared_and_recomputed),
    "tied_reduced_per_user": on_demand_cases(shared_and_recomputed),
}
"""Mistakes that show only in models of one kind are looked for among those; all kinds are drawn by the fuzz test."""


def _examples(drawn: st.SearchStrategy[Case]) -> list[Case]:
    found: list[Case] = []

    @settings(
        max_examples=ENOUGH,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=drawn)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_is_caught(mutation: str) -> None:
    examples = _examples(CONCERNED.get(mutation, on_several_ranks))
    for number, case in enumerate(examples, 1):
        try:
            check(case, mutation)
        except AssertionError as error:
            print(f"{mutation}: caught by example {number}: {str(error)[:200]}")
            check(case)  # and nothing but the mistake was wrong
            return
    pytest.fail(f"{mutation} passes {len(examples)} examples")

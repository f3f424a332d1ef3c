"""Random modules under random knobs train as the plain process does.

The ordinary run takes a fixed set of examples; ``make fuzz`` takes some 500 new ones (``FUZZ_EXAMPLES`` says how many).
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.jobs import Case, check
from tests.fuzz.strategies import cases, undrawn_knobs

EVERY_CHECK = list(HealthCheck)


@settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=EVERY_CHECK)
@given(case=cases)
def test_random_modules_train_as_the_plain_process(case: Case) -> None:
    check(case)


@pytest.mark.fuzz
@pytest.mark.timeout(0)
@settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "500")),
    deadline=None,
    print_blob=True,
    suppress_health_check=EVERY_CHECK,
)
@given(case=cases)
def test_many_random_modules_train_as_the_plain_process(case: Case) -> None:
    check(case)


def test_every_knob_is_drawn() -> None:
    assert not undrawn_knobs()

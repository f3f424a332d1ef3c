"""What is wrong with a real step on two ranks is the first thing that an explanation names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.report.planted import steps_ledger
from zerotune.report.explain import explain


@pytest.mark.parametrize(
    ("knobs", "fault", "words", "knob"),
    [
        ({"prefetch_distance": 0}, "", "gathers are not hidden at all", "prefetch_distance"),
        ({}, "release never", "full parameters lie idle", "release: after_use"),
        ({"reduce_bucket_size": 10**7}, "", "reduced at the very end", "reduce_bucket_size"),
        ({}, "slow rank", "rank 1 is slow", "that rank's node"),
        ({}, "huge unit", "one unit is huge: 2", "unit_size"),
    ],
)
def test_a_planted_fault_is_the_first_finding(
    knobs: dict[str, Any], fault: str, words: str, knob: str
) -> None:
    found = explain(run_on_ranks(2, steps_ledger, knobs, fault, limit=60))
    assert found is not None and found.findings, found
    assert words in found.findings[0].text, [finding.text for finding in found.findings]
    assert knob in found.findings[0].remedy


def test_a_healthy_step_has_none() -> None:
    found = explain(run_on_ranks(2, steps_ledger, {}, limit=60))
    assert found is not None
    assert [finding.text for finding in found.findings] == []

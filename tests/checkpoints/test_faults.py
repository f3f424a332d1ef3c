"""``make faults``: a kill at 50 random moments. Three of them are among the scenarios that always run."""

from __future__ import annotations

import time

import pytest

from tests.checkpoints.faults import check_moments, random_moments


@pytest.mark.faults
@pytest.mark.timeout(3000)
def test_killed_at_fifty_random_moments(tmp_path):
    seed = int(time.time())
    print(f"seed {seed}")
    check_moments(tmp_path, random_moments(seed, 50))

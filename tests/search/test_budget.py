from __future__ import annotations

from datetime import timedelta

from tests.builders import EPOCH, make_run
from zerotune.records import RunRecord
from zerotune.search.budget import Budget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def took(seconds: float) -> RunRecord:
    return make_run("t-1", 1024.0, created=EPOCH, ended=EPOCH + timedelta(seconds=seconds))


def test_the_rest_is_expected_from_the_median_trial_and_the_confirmation() -> None:
    budget = Budget(trials=10, time_s=None, confirmations=4, clock=Clock())
    assert budget.eta_seconds(0) is None
    budget.add_trials([took(10), took(12), took(500)])
    short = 1.5 + 7 * 1.0 + 0.3  # set-up, seven steps, handling
    assert budget.eta_seconds(3) == 7 * 12 + 4 * short
    budget.add_confirmation(took(2))
    assert budget.eta_seconds(10) == 4 * 2
    assert budget.confirmation_eta_seconds(3) == 6


def test_time_leaves_room_for_the_confirmation() -> None:
    clock = Clock()
    budget = Budget(trials=100, time_s=100.0, confirmations=4, spent_s=20.0, clock=clock)
    budget.add_trials([took(10)])
    assert not budget.time_is_up()
    clock.now += 36
    assert budget.time_is_up() and not budget.is_overdrawn
    clock.now += 50
    assert budget.is_overdrawn and budget.wall_seconds == 106.0

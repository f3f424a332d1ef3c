from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import MIB, make_run
from zerotune.records import Interval, RunKind, RunRecord, Status
from zerotune.search.confirm import (
    CONTENDERS,
    Round,
    choose_candidates,
    complete_rounds,
    failed_numbers,
    is_tie,
    judge,
)


def trial(number: int, speed: float | None = 1000.0, peak: int = 100, **fields: object) -> RunRecord:
    fields.setdefault("is_baseline", number == 0)
    return make_run(f"t-{number}", speed, number=number, peak_memory_bytes=peak * MIB, **fields)  # type: ignore[arg-type]


def confirmation(number: int, step_s: float | None = 1.0, status: Status | None = None) -> RunRecord:
    speed = 1024 / step_s if step_s else None
    return make_run("c-1", speed, number=number, kind=RunKind.CONFIRMATION, status=status)


def test_the_best_few_and_the_baseline_are_measured_again() -> None:
    trials = [trial(number, 1000.0 + number) for number in range(8)]
    trials.append(trial(8, 9999.0, feasible=False))
    trials.append(trial(9, None))
    chosen = choose_candidates(trials, "throughput")
    assert chosen is not None
    assert chosen.reference.is_baseline and chosen.numbers == (0, 7, 6, 5)
    assert len(chosen.order) == CONTENDERS + 1


def test_without_a_feasible_baseline_the_first_feasible_run_is_the_reference() -> None:
    trials = [trial(0, None), trial(1, None), trial(2, 1000.0), trial(3, 2000.0)]
    chosen = choose_candidates(trials, "throughput")
    assert chosen is not None and chosen.numbers == (2, 3)
    assert choose_candidates(trials[:2], "throughput") is None


def test_by_memory_the_smallest_are_the_contenders() -> None:
    trials = [trial(number, 1000.0, peak=200 - number) for number in range(6)]
    chosen = choose_candidates(trials, "memory")
    assert chosen is not None and chosen.numbers == (0, 5, 4, 3)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([None, 1.0, 2.0])),
        max_size=40,
    )
)
def test_only_whole_rounds_count_whatever_was_broken_off(runs: list[tuple[int, float | None]]) -> None:
    rows = [confirmation(number, step_s) for number, step_s in runs]
    rounds = complete_rounds(rows, [0, 1, 2])
    measured = [number for number, step_s in runs if step_s is not None]
    assert all(set(each) == {0, 1, 2} for each in rounds)
    assert len(rounds) <= min(measured.count(number) for number in (0, 1, 2))


def test_rounds_in_turns_are_all_found() -> None:
    rows = [confirmation(number, 1.0 + number) for _ in range(5) for number in (0, 3, 1)]
    assert complete_rounds(rows, [0, 1, 3]) == [{0: 1.0, 3: 4.0, 1: 2.0}] * 5
    half = [confirmation(0), confirmation(3), *rows]
    assert len(complete_rounds(half, [0, 1, 3])) == 5


def test_only_faults_of_the_configuration_count_against_a_candidate() -> None:
    rows = [confirmation(number, None, status) for number, status in enumerate(Status)]
    failed = {list(Status)[number] for number in failed_numbers(rows)}
    assert failed == {Status.PRUNED, Status.OOM_DEVICE, Status.OOM_HOST, Status.TIMEOUT, Status.FAILED}


def test_every_second_round_runs_backwards() -> None:
    chosen = choose_candidates([trial(number, 1000.0 + number) for number in range(4)], "throughput")
    assert chosen is not None
    turns = [[record.trial_number for record in chosen.turns(done)] for done in range(4)]
    assert turns == [[0, 3, 2, 1], [1, 2, 3, 0], [0, 3, 2, 1], [1, 2, 3, 0]]
    rows = [confirmation(number, 1.0 + number) for turn in turns for number in turn if number is not None]
    assert complete_rounds(rows, chosen.numbers) == [{0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}] * 4
    # The first round is broken off in its middle, the third at its end; each is taken again from its beginning.
    rows = [confirmation(0), confirmation(3), *rows[:8], *rows[8:11], *rows[8:]]
    assert len(complete_rounds(rows, chosen.numbers)) == 4


def test_a_machine_that_slows_down_within_rounds_favours_nobody() -> None:
    chosen = choose_candidates([trial(number) for number in range(4)], "throughput")
    assert chosen is not None
    rounds: list[Round] = []
    slowness = 1.0
    for done in range(8):
        current: Round = {}
        for record in chosen.turns(done):
            slowness *= 1.02
            current[record.trial_number or 0] = slowness
        rounds.append(current)
    for each in judge(chosen, rounds, "throughput"):
        assert each.speedup.value == pytest.approx(1.0, abs=1e-9)


def rounds_of(times: dict[int, float], count: int, noise: float, drift: float, seed: int) -> list[Round]:
    """Step times with noise of their own each, and a drift that all share."""
    rng = random.Random(seed)
    return [
        {number: step * (1 + drift * turn) * rng.gauss(1.0, noise) for number, step in times.items()}
        for turn in range(count)
    ]


def test_a_shared_drift_does_not_hide_the_winner() -> None:
    """The machine gets three times slower meanwhile; the ratio within each round does not care."""
    chosen = choose_candidates([trial(0), trial(1), trial(2)], "throughput")
    assert chosen is not None
    rounds = rounds_of({0: 1.0, 1: 0.97, 2: 1.03}, 8, noise=0.002, drift=0.3, seed=1)
    confirmed = judge(chosen, rounds, "throughput")
    assert [each.run_id for each in confirmed] == ["t-1", "t-0", "t-2"]
    best = confirmed[0].speedup
    assert best.low < 1 / 0.97 < best.high and not is_tie(best)
    assert confirmed[1].speedup == Interval(value=1.0, low=1.0, high=1.0)
    assert [each.is_reference for each in confirmed] == [False, True, False]
    slowest, fastest = rounds[-1][0], rounds[0][0]
    assert fastest < confirmed[1].step_time_s.value < slowest
    assert confirmed[1].tokens_per_second.value == pytest.approx(1024 / confirmed[1].step_time_s.value)


def test_of_those_that_tie_with_the_fastest_the_smallest_peak_wins() -> None:
    trials = [trial(0, peak=300), trial(1, peak=200), trial(2, peak=100), trial(3, peak=50)]
    chosen = choose_candidates(trials, "throughput")
    assert chosen is not None
    rounds = rounds_of({0: 1.0, 1: 0.90, 2: 0.905, 3: 1.2}, 8, noise=0.01, drift=0.0, seed=3)
    confirmed = judge(chosen, rounds, "throughput")
    assert [each.run_id for each in confirmed] == ["t-2", "t-1", "t-0", "t-3"]
    assert confirmed[0].speedup.value < confirmed[1].speedup.value, "slower, but not by more than noise"
    # A tie with the defaults goes to them if they need no more memory.
    even = judge(chosen, rounds_of({0: 1.0, 1: 1.1, 2: 1.1, 3: 1.001}, 8, 0.01, 0.0, 2), "throughput")
    assert even[0].run_id == "t-3"
    small = choose_candidates([trial(0, peak=10), trial(1, peak=20)], "throughput")
    assert small is not None
    assert judge(small, rounds_of({0: 1.0, 1: 0.999}, 8, 0.01, 0.0, 3), "throughput")[0].run_id == "t-0"


def test_a_single_candidate_needs_no_turns() -> None:
    chosen = choose_candidates([trial(0)], "throughput")
    assert chosen is not None and judge(chosen, [], "throughput") == []


def test_the_same_thing_against_itself_is_a_tie() -> None:
    chosen = choose_candidates([trial(0), trial(1)], "throughput")
    assert chosen is not None
    ties = [
        is_tie(judge(chosen, rounds_of({0: 1.0, 1: 1.0}, 8, 0.02, 0.0, seed), "throughput")[0].speedup)
        for seed in range(200)
    ]
    assert sum(ties) / len(ties) == pytest.approx(0.95, abs=0.05)


def test_by_memory_the_smaller_peak_wins_and_speed_breaks_ties() -> None:
    chosen = choose_candidates([trial(0, peak=300), trial(1, peak=200), trial(2, peak=200)], "memory")
    assert chosen is not None
    rounds = rounds_of({0: 1.0, 1: 1.5, 2: 1.2}, 4, 0.0, 0.0, 0)
    assert [each.run_id for each in judge(chosen, rounds, "memory")] == ["t-2", "t-1", "t-0"]

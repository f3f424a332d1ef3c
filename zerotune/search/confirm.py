"""The winner is confirmed in turns: the best few and the baseline are measured again, A B C D, D C B A, A B C D, …

Single measurements minutes apart compare the machine's moods as much as the configurations. Within one round the
candidates run right after each other, so their ratio in that round is a paired observation. Every second round runs
backwards, so that over two rounds each candidate stands equally early: a machine that gets steadily slower, or
faster, favours nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from zerotune.records import Confirmed, Interval, RunRecord, Status
from zerotune.search.feasibility import is_feasible
from zerotune.store.query import ties_in_turns
from zerotune.train.measure import median_interval, paired_ratio, throughput

CONTENDERS = 3
"""How many of the best are measured again, beside what they are compared with."""

LEAST_ROUNDS = 3
"""Rounds that are taken even when the time is spent."""

WARMUP_STEPS = 2
STEADY_STEPS = 5

Round = dict[int, float]
"""Step time in seconds of every candidate of one round, by trial number."""


@dataclass(frozen=True)
class Candidates:
    """Who is measured in turns.

    Attributes:
        reference: What ratios are relative to: the baseline, or the first feasible run if the baseline is not.
        order: All of them, the reference first.
    """

    reference: RunRecord
    order: tuple[RunRecord, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(_number(record) for record in self.order)

    def turns(self, rounds_done: int) -> tuple[RunRecord, ...]:
        """The order in which the next round measures them: every second round runs backwards."""
        return self.order[::-1] if rounds_done % 2 else self.order

    def without(self, dropped: Collection[int]) -> Candidates:
        """The same without some that cannot be measured any more; the reference stays whatever happens."""
        kept = (record for record in self.order[1:] if _number(record) not in dropped)
        return Candidates(self.reference, (self.reference, *kept))


def _number(record: RunRecord) -> int:
    assert record.trial_number is not None
    return record.trial_number


def better_key(objective: str) -> Callable[[RunRecord], tuple[float, float]]:
    """Sort key of measured runs under an objective, best first; the other figure breaks ties."""

    def key(record: RunRecord) -> tuple[float, float]:
        assert record.measurement is not None
        throughput = -record.measurement.tokens_per_second.value
        memory = float(record.measurement.peak_memory_bytes)
        return (memory, throughput) if objective == "memory" else (throughput, memory)

    return key


def choose_candidates(trials: Iterable[RunRecord], objective: str) -> Candidates | None:
    """The best few feasible trials and what they are compared with; ``None`` if none is feasible."""
    feasible = [record for record in trials if is_feasible(record)]
    if not feasible:
        return None
    baseline = next((record for record in feasible if record.is_baseline), None)
    reference = baseline or min(feasible, key=_number)
    others = [record for record in feasible if record is not reference]
    best = sorted(others, key=better_key(objective))[:CONTENDERS]
    return Candidates(reference, (reference, *best))


def complete_rounds(confirmations: Iterable[RunRecord], numbers: Iterable[int]) -> list[Round]:
    """Rounds that earlier sessions finished, from the rows of the store in the order of their creation.

    A round counts if every candidate was measured in it and nobody twice; one that was broken off is dropped, for
    its halves were not measured beside each other.
    """
    wanted = set(numbers)
    rounds: list[Round] = []
    current: Round = {}
    for record in confirmations:
        number = record.trial_number
        if number not in wanted or record.status is not Status.COMPLETE or record.measurement is None:
            continue
        if number in current:
            current = {}
        current[number] = record.measurement.step_time_s.value
        if len(current) == len(wanted):
            rounds.append(current)
            current = {}
    return rounds


def failed_numbers(confirmations: Iterable[RunRecord]) -> set[int]:
    """Candidates that did not run to their end when measured again, other than by a fault of the machines."""
    forgiven = (Status.RUNNING, Status.COMPLETE, Status.INTERRUPTED, Status.LOST_NODE, Status.NOT_LAUNCHED)
    return {_number(record) for record in confirmations if record.status not in forgiven}


def judge(candidates: Candidates, rounds: list[Round], objective: str) -> list[Confirmed]:
    """What the rounds say of every candidate, the winner first; nothing if there were none.

    By throughput the fastest wins, and of those whose interval overlaps its own the one with the smallest peak; by
    memory the smallest peak, which does not depend on the machine's mood.
    """
    if not rounds:
        return []
    reference = _number(candidates.reference)
    confirmed = {}
    for record in candidates.order:
        number = _number(record)
        times = [each[number] for each in rounds]
        if number == reference:
            ratio = Interval(value=1.0, low=1.0, high=1.0)
        else:
            ratio = paired_ratio([each[reference] for each in rounds], times)
        assert record.measurement is not None
        step_time = median_interval(times)
        confirmed[record.run_id] = Confirmed(
            run_id=record.run_id,
            speedup=ratio,
            rounds=len(rounds),
            is_reference=number == reference,
            step_time_s=step_time,
            tokens_per_second=throughput(step_time, record.measurement.tokens_per_step),
        )
    ties = ties_in_turns(candidates.order, confirmed, "memory" if objective == "memory" else "throughput")
    return [confirmed[record.run_id] for tie in ties for record in tie]


def is_tie(speedup: Interval) -> bool:
    """Whether a speed-up lies inside the noise."""
    return speedup.low <= 1.0 <= speedup.high

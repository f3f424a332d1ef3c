"""What a search or a launch tells whoever shows it, as it happens."""

from __future__ import annotations

from zerotune.records.base import Record
from zerotune.records.measurement import Confirmed, Interval
from zerotune.records.run import RunRecord


class Notice(Record):
    """One line worth reading: what was taken up again, why something was chosen, what was skipped."""

    message: str


class SearchStarted(Record):
    """The plan of a search.

    Attributes:
        study: Its name.
        trials: Finished trials wanted, over all sessions.
        finished: Trials that earlier sessions finished.
        ranks: Number of data-parallel ranks.
        objective: ``throughput``, ``memory`` or ``pareto``.
        memory_budget: Bytes, if there is one.
        time_budget: Seconds over all sessions, if there is one.
        spent_seconds: Seconds that earlier sessions spent.
        space: Name of the search space.
    """

    study: str
    trials: int
    finished: int
    ranks: int
    objective: str
    memory_budget: int | None
    time_budget: float | None
    spent_seconds: float
    space: str


class TrialStarted(Record):
    """A trial begins.

    Attributes:
        run_id: Its row in the store.
        number: Its number in the study; 0 is the baseline.
        source: Where the configuration comes from: ``baseline``, ``file``, ``retry``, ``start`` (of turns), ``one knob``,
            ``combined``, ``sampler`` or ``random``.
        changes: Knobs that differ from the baseline, as ``{name: value}``.
    """

    run_id: str
    number: int
    source: str
    changes: dict[str, str]


class TrialProgress(Record):
    """Where the running trial stands."""

    run_id: str
    phase: str
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int | None = None


class TrialFinished(Record):
    """A trial ended.

    Attributes:
        run: Its row.
        changes: Knobs that differ from the baseline.
        finished: Finished trials so far.
        trials: Finished trials wanted.
        eta_seconds: Expected time to the end of the search, from the median trial, confirmation included.
        best: The best row so far, if any is feasible.
        baseline: The baseline's row, if it was measured.
    """

    run: RunRecord
    changes: dict[str, str]
    finished: int
    trials: int
    eta_seconds: float | None
    best: RunRecord | None
    baseline: RunRecord | None


class ConfirmationProgress(Record):
    """The candidates are measured again in turns.

    Attributes:
        round: Number of the round, from 1.
        rounds: Rounds in all.
        done: Short measurements taken.
        total: Short measurements in all.
        trial_number: The candidate that is measured next.
        eta_seconds: Expected time to the end.
    """

    round: int
    rounds: int
    done: int
    total: int
    trial_number: int
    eta_seconds: float | None


class SearchResult(Record):
    """The answer to a search.

    Attributes:
        study: Name of the study.
        counts: Number of trials by status.
        baseline: The baseline's row.
        best: The winner's row, always feasible.
        reference: Run id of the row that ``speedup`` is relative to, where that is not the baseline.
        speedup: Throughput of the winner over the baseline's; ``None`` if the baseline does not fit or failed.
        is_tie: Whether the interval contains 1: the difference is inside the noise.
        confirmed: Every candidate of the confirmation, the winner first; empty if there was but one.
        trials: Every finished trial, in order of its number.
        ended_because: ``trials``, ``time`` or ``exhausted``.
        wall_seconds: Over all sessions.
        executed: Runs that this session executed, confirmation included.
    """

    study: str
    counts: dict[str, int]
    baseline: RunRecord | None
    best: RunRecord
    reference: str | None = None
    speedup: Interval | None = None
    is_tie: bool = False
    confirmed: list[Confirmed]
    trials: list[RunRecord]
    ended_because: str
    wall_seconds: float
    executed: int


class SearchFinished(Record):
    """The search is over and its winner confirmed."""

    result: SearchResult


Event = (
    Notice
    | SearchStarted
    | TrialStarted
    | TrialProgress
    | TrialFinished
    | ConfirmationProgress
    | SearchFinished
)

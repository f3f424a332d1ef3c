"""Rows of a ranking: what the tables, the JSON documents and the CSV file all show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerotune.records import Confirmed, Interval, RunKind, RunRecord, StudyRecord
from zerotune.report.differences import Difference, knob_differences
from zerotune.report.ratio import unpaired_ratio
from zerotune.store.query import Sort, is_candidate, rank


@dataclass(frozen=True)
class Row:
    """One run in a ranking.

    Attributes:
        run: The run.
        rank: Its place, ``None`` if it is not ranked: it failed, is over the budget, or is no trial.
        is_tied: Whether memory decided its place, because throughput could not.
        pareto: Whether it is on the front of throughput and peak memory.
        is_winner: Whether its study confirmed it as the best.
        confirmations: How often it was measured again in turns.
        confirmed: What its study found in turns; ``None`` if it was measured once, or the study has no answer yet.
        changes: Knobs that differ from its baseline's.
        reference: The run that :attr:`speedup` is relative to: the baseline of its study, or the first feasible
            run where that does not fit or failed.
        speedup: Ratio of throughput over the reference: paired where the study measured it in turns, else that of
            two measurements minutes apart.
    """

    run: RunRecord
    rank: int | None
    is_tied: bool
    pareto: bool
    is_winner: bool
    confirmations: int
    confirmed: Confirmed | None
    changes: tuple[Difference, ...]
    reference: RunRecord | None
    speedup: Interval | None

    @property
    def tokens_per_second(self) -> Interval | None:
        """The rate that its place rests on: the median over the turns, or the trial's own measurement."""
        measured = self.confirmed or self.run.measurement
        return measured.tokens_per_second if measured else None

    @property
    def step_time_s(self) -> Interval | None:
        """The same as the time of one optimizer step."""
        measured = self.confirmed or self.run.measurement
        return measured.step_time_s if measured else None

    @property
    def is_paired(self) -> bool:
        """Whether the speed-up is a ratio within rounds in turns."""
        return self.confirmed is not None

    @property
    def baseline_speedup(self) -> Interval | None:
        """The speed-up, if it is one over the baseline."""
        return self.speedup if self.reference is not None and self.reference.is_baseline else None


def rank_rows(
    runs: Iterable[RunRecord],
    studies: Iterable[StudyRecord] = (),
    sort: Sort = "throughput",
    baseline: RunRecord | None = None,
) -> list[Row]:
    """Rows of one workload on one cluster: the ranked trials, best first, then all others, oldest first.

    Runs that confirm a trial in turns are not rows of their own; the trial's row counts them.

    Args:
        runs: Of one workload and cluster.
        studies: Their studies, for what they measured in turns.
        sort: What the ranking is by.
        baseline: What runs that belong to no study are compared with; by default nothing, and in a study
            always its own baseline.

    Raises:
        ValueError: The runs are of several workloads or clusters.
    """
    runs = list(runs)
    trials = [run for run in runs if run.kind is RunKind.TRIAL]
    rounds = Counter(
        (run.study, run.trial_number)
        for run in runs
        if run.kind is RunKind.CONFIRMATION and run.measurement is not None
    )
    by_name = {study.name: study for study in studies}
    ranked = {each.run.run_id: each for each in rank(trials, by_name.values(), sort)}
    baselines = {run.study: run for run in trials if run.is_baseline}
    references = {
        study: reference
        for study in {run.study for run in trials}
        if (reference := _reference(study, trials))
    }

    def row(run: RunRecord) -> Row:
        place = ranked.get(run.run_id)
        origin = baselines.get(run.study, baseline)
        reference = references.get(run.study)
        study = by_name.get(run.study or "")
        confirmed = (
            next((each for each in study.confirmed if each.run_id == run.run_id), None) if study else None
        )
        return Row(
            run=run,
            rank=place.rank if place else None,
            is_tied=place.is_tied if place else False,
            pareto=place.pareto if place else False,
            is_winner=bool(study and study.best == run.run_id),
            confirmations=rounds[run.study, run.trial_number] if run.kind is RunKind.TRIAL else 0,
            confirmed=confirmed,
            changes=tuple(knob_differences(origin.config, run.config)) if origin else (),
            reference=reference,
            speedup=_speedup(run, confirmed, reference),
        )

    shown = [run for run in runs if run.kind is not RunKind.CONFIRMATION]
    others = [run for run in shown if run.run_id not in ranked]
    others.sort(key=lambda run: (run.created, run.trial_number or 0, run.run_id))
    return [row(each.run) for each in ranked.values()] + [row(run) for run in others]


def choose(rows: Sequence[Row], top: int | None = None, pareto: bool = False) -> list[Row]:
    """The ranked rows that are asked for."""
    ranked = [row for row in rows if row.rank is not None and (row.pareto or not pareto)]
    return ranked[:top]


def _reference(study: str | None, trials: Sequence[RunRecord]) -> RunRecord | None:
    """The baseline of a study, or its first feasible trial where the baseline is none."""
    if study is None:
        return None
    candidates = [run for run in trials if run.study == study and is_candidate(run)]
    first = sorted(candidates, key=lambda run: (not run.is_baseline, run.trial_number or 0, run.created))
    return first[0] if first else None


def _speedup(run: RunRecord, confirmed: Confirmed | None, reference: RunRecord | None) -> Interval | None:
    if run.measurement is None or reference is None or reference.measurement is None:
        return None
    if run.run_id == reference.run_id:
        return Interval(value=1.0, low=1.0, high=1.0)
    if confirmed is not None:
        return confirmed.speedup
    return unpaired_ratio(run.measurement.tokens_per_second, reference.measurement.tokens_per_second)

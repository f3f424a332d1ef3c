"""A search from its first trial to its confirmed winner: ask-and-tell in the driver, one trial at a time.

Everything that must survive a killed driver is in the store before and after each trial, so that a search is
resumed by doing the same again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import optuna

from zerotune.cluster.messages import Limits
from zerotune.config.errors import RunFailed, UsageError
from zerotune.records import Interval, RunKind, RunRecord, Status, StudyRecord
from zerotune.records.events import (
    ConfirmationProgress,
    Event,
    Notice,
    SearchFinished,
    SearchResult,
    SearchStarted,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from zerotune.runs.execute import Executor, RunRequest
from zerotune.runs.owner import is_alive, this_owner
from zerotune.runs.reap import reap
from zerotune.search import confirm
from zerotune.search.budget import Budget
from zerotune.search.configuration import canonical_key, changes
from zerotune.search.feasibility import directions, is_feasible
from zerotune.search.nothing import all_failed, why_no_winner
from zerotune.search.plan import SearchPlan
from zerotune.search.progress import deserves_second_chance, finished_trials, histogram, trial_rows
from zerotune.search.propose import Proposal, Proposer
from zerotune.search.question import check_same_question
from zerotune.search.sampler import make_sampler
from zerotune.store.store import Store
from zerotune.train.context import Progress
from zerotune.train.spec import RunSpec

Emit = Callable[[Event], None]

GIVE_UP_SHARE = 0.9
"""A trial whose whole interval lies below this share of the best cannot win, and is not measured any finer."""

_HOPELESS = 3
"""So many failures at the start of a session, and nothing else, end it: the fault is not in the knobs."""

_LOST_NODES = 2
"""Nodes that may be lost during the confirmation before it is given up."""

_DRIVER = "zerotune:driver"


@dataclass
class Search:
    """One session of a search.

    Attributes:
        plan: What is asked.
        store: Where everything is kept.
        executor: Who runs trials.
        emit: Told what happens.
    """

    plan: SearchPlan
    store: Store
    executor: Executor
    emit: Emit
    _budget: Budget = field(init=False)
    _optuna: optuna.Study = field(init=False)
    _proposer: Proposer = field(init=False)
    _finished: list[RunRecord] = field(init=False)
    _study: StudyRecord = field(init=False)
    _run_id: str = field(init=False)

    def run(self) -> SearchResult:
        """Search until the budget is spent, confirm the winner, and return it.

        Raises:
            UsageError: The study asked another question, or somebody else is at work on it.
            NothingFeasible: No trial meets the memory budget.
            RunFailed: No trial ran to its end.
            ResourceError: The cluster cannot give the ranks any more.
            KeyboardInterrupt: The same search goes on from here.
        """
        self._open()
        try:
            ended_because = self._trials()
            result = self._conclude(ended_because)
        finally:
            self._save_wall_seconds()
            self._optuna.set_user_attr(_DRIVER, None)
        self.emit(SearchFinished(result=result))
        return result

    # ------------------------------------------------------------------------------------------------- opening

    def _open(self) -> None:
        plan = self.plan
        known = self.store.find_study(plan.study)
        if known is None:
            known = StudyRecord(
                name=plan.study,
                fingerprint=plan.question,
                workload=plan.workload,
                cluster=plan.cluster,
                objective=plan.search.objective,
                memory_budget=plan.search.memory_budget,
                trials_wanted=plan.search.trials,
            )
            self.store.add_study(known)
        check_same_question(known, plan.question)
        self._study = known
        self._optuna = self._open_optuna()
        self._lock()
        for ghost in reap(self.store, plan.study):
            self.emit(Notice(message=f"trial {ghost.trial_number} ({ghost.run_id}) was broken off earlier"))
        self._refresh()
        self._proposer = Proposer(self._optuna, plan)
        self._proposer.take_up(trial_rows(self.store, plan.study), self._finished)
        self._budget = Budget(
            trials=plan.search.trials,
            time_s=plan.search.time,
            confirmations=plan.search.confirm_rounds * (confirm.CONTENDERS + 1),
            spent_s=known.wall_seconds,
        )
        self._budget.add_trials(self._finished)
        self._update_study(trials_wanted=plan.search.trials)
        self.emit(
            SearchStarted(
                study=plan.study,
                trials=plan.search.trials,
                finished=len(self._finished),
                ranks=plan.ranks,
                objective=plan.search.objective,
                memory_budget=plan.search.memory_budget,
                time_budget=plan.search.time,
                spent_seconds=known.wall_seconds,
                space=plan.search.space,
            )
        )

    def _open_optuna(self) -> optuna.Study:
        storage = self.store.open_optuna_storage()
        name, objective = self.plan.study, self.plan.search.objective
        study = optuna.create_study(
            storage=storage, study_name=name, directions=directions(objective), load_if_exists=True
        )
        trials = len(study.get_trials(deepcopy=False))
        study.sampler = make_sampler(self.plan.search.sampler, self.plan.search.seed, trials)
        return study

    def _lock(self) -> None:
        """Refuse a study that another live driver works on, and sign as its driver."""
        owner = self._optuna.user_attrs.get(_DRIVER)
        if owner is not None and owner != this_owner() and is_alive(owner):
            host, pid, _ = owner.rsplit(":", 2)
            raise UsageError(
                f"study {self.plan.study!r} is being searched by process {pid} on {host}",
                "wait for it, or give another --study name",
            )
        self._optuna.set_user_attr(_DRIVER, this_owner())

    def _refresh(self) -> None:
        self._finished = finished_trials(trial_rows(self.store, self.plan.study))

    def _update_study(self, **values: object) -> None:
        self._study = self._study.model_copy(update=values)
        self.store.update_study(self._study)

    def _save_wall_seconds(self) -> None:
        self._update_study(wall_seconds=self._budget.wall_seconds)

    # -------------------------------------------------------------------------------------------------- trials

    def _trials(self) -> str:
        """Run trials until a budget is spent; say which."""
        statuses: list[Status] = []
        while len(self._finished) < self.plan.search.trials:
            if self._finished and self._budget.time_is_up():
                return "time"
            proposal = self._proposer.next()
            if proposal is None:
                self.emit(Notice(message=f"the space has no more than {len(self._finished)} configurations"))
                return "exhausted"
            statuses.append(self._trial(proposal).status)
            if statuses == [Status.FAILED] * _HOPELESS and not any(row.measurement for row in self._finished):
                raise all_failed(self._finished)
        return "trials"

    def _trial(self, proposal: Proposal) -> RunRecord:
        job = proposal.job
        is_baseline = canonical_key(job) == self.plan.baseline_key
        request = RunRequest(
            kind=RunKind.TRIAL,
            spec=RunSpec(
                job=job,
                mode="measure",
                run_dir="",
                warmup_steps=self.plan.search.warmup_steps,
                min_steps=self.plan.search.min_steps,
                max_steps=self.plan.search.max_steps,
                give_up_below=self._give_up_below(),
            ),
            workload=self.plan.workload,
            study=self.plan.study,
            trial_number=len(self._finished),
            is_baseline=is_baseline,
            memory_budget=self.plan.search.memory_budget,
            limits=self._limits(),
        )

        def started(row: RunRecord) -> None:
            self._proposer.running(proposal, row)
            self.emit(
                TrialStarted(
                    run_id=row.run_id,
                    number=len(self._finished),
                    source=proposal.source,
                    changes=changes(job, self.plan.baseline),
                )
            )
            self._run_id = row.run_id

        try:
            record = self.executor.execute(request, self._progress, started).run
            _check_launched(record)
        except BaseException:
            self._proposer.give_back(proposal)
            raise
        self._refresh()
        if deserves_second_chance(record, self._finished):
            self._proposer.give_back(proposal)
        else:
            self._proposer.tell(proposal, record)
        self._after(record)
        return record

    def _limits(self) -> Limits:
        """The whole trial has one limit; the message of whoever overruns it names the phase."""
        limit = self.plan.search.trial_timeout
        return Limits(start_s=limit, first_progress_s=limit, silence_s=limit, total_s=limit)

    def _progress(self, progress: Progress) -> None:
        self.emit(
            TrialProgress(
                run_id=self._run_id,
                phase=progress.phase,
                step=progress.step,
                steps=progress.steps,
                loss=progress.loss,
                tokens_per_second=progress.tokens_per_second,
                memory_bytes=progress.memory_bytes,
            )
        )

    def _after(self, record: RunRecord) -> None:
        self._budget.add_trials([record])
        if self._study.best is not None:
            # An earlier session's answer does not cover this trial. Its rounds in turns stay in the store.
            self._update_study(best=None, speedup=None, is_tie=False, confirmed=[])
        self._save_wall_seconds()
        self.emit(
            TrialFinished(
                run=record,
                changes=changes(record.config, self.plan.baseline),
                finished=len(self._finished),
                trials=self.plan.search.trials,
                eta_seconds=self._budget.eta_seconds(len(self._finished)),
                best=self._best_so_far(),
                baseline=self._baseline(),
            )
        )

    def _best_so_far(self) -> RunRecord | None:
        feasible = [row for row in self._finished if is_feasible(row)]
        return min(feasible, key=confirm.better_key(self.plan.search.objective), default=None)

    def _baseline(self) -> RunRecord | None:
        return next((row for row in self._finished if row.is_baseline), None)

    def _give_up_below(self) -> float | None:
        """Tokens per second below which a trial cannot win; only speed alone can be given up on."""
        best = self._best_so_far()
        if self.plan.search.objective != "throughput" or best is None or best.measurement is None:
            return None
        return GIVE_UP_SHARE * best.measurement.tokens_per_second.value

    # ------------------------------------------------------------------------------------------------- the end

    def _conclude(self, ended_because: str) -> SearchResult:
        objective = self.plan.search.objective
        candidates = confirm.choose_candidates(self._finished, objective)
        if candidates is None:
            raise why_no_winner(self._finished, self.plan.baseline)
        candidates, rounds = self._confirm(candidates)
        confirmed = confirm.judge(candidates, rounds, objective)
        best, speedup = candidates.reference, Interval(value=1.0, low=1.0, high=1.0)
        if confirmed:
            best = next(row for row in candidates.order if row.run_id == confirmed[0].run_id)
            speedup = confirmed[0].speedup
        has_baseline = candidates.reference.is_baseline
        tie = has_baseline and confirm.is_tie(speedup)
        self._update_study(
            best=best.run_id, speedup=speedup if has_baseline else None, is_tie=tie, confirmed=confirmed
        )
        return SearchResult(
            study=self.plan.study,
            counts=histogram(self._finished),
            baseline=self._baseline(),
            best=best,
            reference=None if has_baseline else candidates.reference.run_id,
            speedup=speedup if has_baseline else None,
            is_tie=tie,
            confirmed=confirmed,
            trials=self._finished,
            ended_because=ended_because,
            wall_seconds=self._budget.wall_seconds,
            executed=self.executor.executed,
        )

    def _confirm(self, candidates: confirm.Candidates) -> tuple[confirm.Candidates, list[confirm.Round]]:
        """Measure the candidates in turns, going on where an earlier session stopped.

        A candidate that fails now drops out; the reference may not. When the time is spent, a few rounds must do.
        """
        wanted = self.plan.search.confirm_rounds
        lost_nodes = 0
        while True:
            rows = self.store.runs(study=self.plan.study, kind=RunKind.CONFIRMATION)
            candidates = candidates.without(confirm.failed_numbers(rows))
            rounds = confirm.complete_rounds(rows, candidates.numbers)[:wanted]
            enough = confirm.LEAST_ROUNDS if self._budget.is_overdrawn else wanted
            if len(candidates.order) == 1 or len(rounds) >= enough:
                return candidates, rounds
            for turn, candidate in enumerate(candidates.turns(len(rounds))):
                self._announce(candidates, len(rounds), turn)
                record = self._measure_again(candidate)
                if record.measurement is not None:
                    continue
                said = record.failure.message if record.failure else record.status.value
                self.emit(
                    Notice(message=f"trial {candidate.trial_number} failed when measured again: {said}")
                )
                is_lost = record.status is Status.LOST_NODE
                lost_nodes += is_lost
                if lost_nodes > _LOST_NODES or (candidate is candidates.reference and not is_lost):
                    raise RunFailed(f"the confirmation failed: {said}", f"see {record.run_dir}")
                break

    def _announce(self, candidates: confirm.Candidates, rounds_done: int, turn: int) -> None:
        size, wanted = len(candidates.order), self.plan.search.confirm_rounds
        number = candidates.turns(rounds_done)[turn].trial_number
        assert number is not None
        done, total = rounds_done * size + turn, wanted * size
        self.emit(
            ConfirmationProgress(
                round=rounds_done + 1,
                rounds=wanted,
                done=done,
                total=total,
                trial_number=number,
                eta_seconds=self._budget.confirmation_eta_seconds(total - done),
            )
        )

    def _measure_again(self, candidate: RunRecord) -> RunRecord:
        record = self.executor.execute(
            RunRequest(
                kind=RunKind.CONFIRMATION,
                spec=RunSpec(
                    job=candidate.config,
                    mode="measure",
                    run_dir="",
                    warmup_steps=confirm.WARMUP_STEPS,
                    min_steps=confirm.STEADY_STEPS,
                    max_steps=confirm.STEADY_STEPS,
                    profile_memory=False,
                    record_ledger=False,
                ),
                workload=self.plan.workload,
                study=self.plan.study,
                trial_number=candidate.trial_number,
                is_baseline=candidate.is_baseline,
                limits=self._limits(),
            )
        ).run
        _check_launched(record)
        self._budget.add_confirmation(record)
        self._save_wall_seconds()
        return record


def _check_launched(record: RunRecord) -> None:
    """Ranks that cannot even be started say nothing about a configuration, and end the search.

    Raises:
        RunFailed: The run never began.
    """
    if record.status in (Status.NOT_LAUNCHED, Status.INTERRUPTED):
        said = record.failure.message if record.failure else record.status.value
        raise RunFailed(f"the ranks could not be started: {said}", f"see {record.run_dir}")

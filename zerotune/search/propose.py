"""What to try next. Nothing that the study knows is tried twice.

The order is: the baseline, the file's own setting, what was broken off, each knob turned by itself and those that helped
together, what the sampler suggests, and when that only repeats what is known, anything at random that does not.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import TrialState

from zerotune.config.schema import JobConfig
from zerotune.records import RunRecord
from zerotune.search.configuration import canonical_key
from zerotune.search.dimensions import Choices, draw, enumerate_all, suggest, to_parameters
from zerotune.search.feasibility import Outcome, is_feasible, memory_violation, what_to_tell
from zerotune.search.plan import SearchPlan
from zerotune.search.turns import nothing_turned, one_knob_turned, together

_ASKED_AGAIN = 5
"""Repetitions that the sampler is forgiven before something is drawn at random."""

_DRAWS = 500
"""Random draws in a space that cannot be listed before it counts as exhausted."""

_RUN_ID = "zerotune:run_id"


@dataclass(frozen=True)
class Proposal:
    """A configuration to try.

    Attributes:
        trial: Optuna's trial that stands for it.
        job: Every knob a number.
        key: Its canonical key.
        source: ``baseline``, ``file``, ``retry``, ``start``, ``one knob``, ``combined``, ``sampler`` or ``random``.
    """

    trial: optuna.trial.Trial
    job: JobConfig
    key: str
    source: str


@dataclass
class Proposer:
    """Turns the sampler's suggestions into configurations that are worth a run.

    Attributes:
        study: Optuna's study.
        plan: The question.
        known: Finished runs by the canonical key of their configuration.
    """

    study: optuna.Study
    plan: SearchPlan
    known: dict[str, RunRecord] = field(default_factory=dict)
    _rows: dict[str, RunRecord] = field(default_factory=dict, init=False)

    def take_up(self, rows: Iterable[RunRecord], finished: Iterable[RunRecord]) -> None:
        """Learn what earlier sessions finished, and settle the trials that they left running in Optuna's tables.

        A driver that was killed between the end of a run and telling the sampler has told the store: that is told
        now. All others are failures that the sampler forgets; :meth:`next` tries their configurations again.
        """
        self._rows = {row.run_id: row for row in rows}
        answers = {row.run_id: row for row in finished}
        for row in answers.values():
            self.known[canonical_key(row.config)] = row
        for frozen in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = optuna.trial.Trial(self.study, frozen._trial_id)
            run_id = frozen.user_attrs.get(_RUN_ID)
            if run_id in answers:
                self._tell(trial, answers[run_id])
            else:
                self.study.tell(trial, state=TrialState.FAIL)

    def next(self) -> Proposal | None:
        """The next configuration, or ``None`` if the space holds nothing new."""
        for source, wanted in self._fixed():
            if (proposal := self._ask(source, wanted)) is not None:
                return proposal
        if self._is_exhausted():
            return None
        for _ in range(_ASKED_AGAIN):
            if (proposal := self._ask("sampler")) is not None:
                return proposal
        unexplored = self._unexplored()
        return None if unexplored is None else self._ask("random", unexplored)

    def running(self, proposal: Proposal, row: RunRecord) -> None:
        """Note which run tries it."""
        proposal.trial.set_user_attr(_RUN_ID, row.run_id)
        self._rows[row.run_id] = row

    def tell(self, proposal: Proposal, record: RunRecord) -> None:
        """Tell the sampler how it ended, and never propose it again."""
        self.known[proposal.key] = record
        self.known[canonical_key(record.config)] = record
        self._tell(proposal.trial, record)

    def give_back(self, proposal: Proposal) -> None:
        """It came to nothing: the sampler forgets it, and :meth:`next` tries it again."""
        self.study.tell(proposal.trial, state=TrialState.FAIL)

    # ------------------------------------------------------------------------------------------------- privates

    def _fixed(self) -> Iterator[tuple[str, _Wanted]]:
        """What is to be tried whatever the sampler thinks."""
        for source, job in (("baseline", self.plan.baseline), ("file", self.plan.from_file)):
            if job is not None and canonical_key(job) not in self.known:
                yield source, self._exactly(job)
        for frozen in self.study.get_trials(deepcopy=False, states=(TrialState.FAIL,)):
            row = self._rows.get(frozen.user_attrs.get(_RUN_ID, ""))
            if row is not None and frozen.params and canonical_key(row.config) not in self.known:
                yield "retry", _Wanted(row.config, dict(frozen.params))
        if self.plan.search.sampler == "tpe":
            yield from self._turns()

    def _turns(self) -> Iterator[tuple[str, _Wanted]]:
        """One knob turned at a time, and what helped together, unless what they begin from does not fit."""
        start = nothing_turned(self.plan)
        if start.key not in self.known:
            yield "start", self._exactly(start.job)
            return
        if not is_feasible(self.known[start.key]):
            return
        for turn in one_knob_turned(self.plan):
            if turn.key not in self.known:
                yield "one knob", self._exactly(turn.job)
        combined = together(self.plan, self.known)
        if combined is not None and combined.key not in self.known:
            yield "combined", self._exactly(combined.job)

    def _exactly(self, job: JobConfig) -> _Wanted:
        choices = self.plan.choices_of(job)
        return _Wanted(job, None if choices is None else self._parameters(choices))

    def _ask(self, source: str, wanted: _Wanted | None = None) -> Proposal | None:
        """Ask for a trial; ``None`` if it stands for something known, which the sampler is then told."""
        if wanted is not None and wanted.parameters is not None:
            self.study.enqueue_trial(wanted.parameters)
        trial = self.study.ask()
        if wanted is None:
            job = self.plan.configure(suggest(trial, self.plan.space.dimensions))
        else:
            job = wanted.job
            if wanted.parameters is not None:  # else the sampler learns nothing from it
                suggest(trial, self.plan.space.dimensions)
        key = canonical_key(job)
        if key not in self.known:
            return Proposal(trial, job, key, source)
        self._tell(trial, self.known[key])
        return None

    def _is_exhausted(self) -> bool:
        points = enumerate_all(self.plan.space.dimensions)
        return points is not None and all(self._key(choices) in self.known for choices in points)

    def _unexplored(self) -> _Wanted | None:
        """A random point of the space that is not known."""
        rng = random.Random(f"{self.plan.search.seed}:{len(self.known)}")
        points = enumerate_all(self.plan.space.dimensions)
        if points is not None:
            left = [choices for choices in points if self._key(choices) not in self.known]
            return self._wanted(rng.choice(left)) if left else None
        for _ in range(_DRAWS):
            choices = draw(rng, self.plan.space.dimensions)
            if self._key(choices) not in self.known:
                return self._wanted(choices)
        return None

    def _wanted(self, choices: Choices) -> _Wanted:
        return _Wanted(self.plan.configure(choices), self._parameters(choices))

    def _parameters(self, choices: Choices) -> dict[str, Any]:
        return to_parameters(choices, self.plan.space.dimensions)

    def _key(self, choices: Choices) -> str:
        return canonical_key(self.plan.configure(choices))

    def _tell(self, trial: optuna.trial.Trial, record: RunRecord) -> None:
        told = what_to_tell(record, self.plan.search.objective)
        for name, value in told.constraints.items():
            trial.set_constraint(name, value)
        # Optuna's dashboard does not show constraints, but attributes.
        trial.set_user_attr("status", record.status.value)
        trial.set_user_attr("memory_over_budget", memory_violation(record))
        if told.outcome is Outcome.COMPLETE:
            self.study.tell(trial, list(told.values))
        else:
            state = TrialState.PRUNED if told.outcome is Outcome.PRUNED else TrialState.FAIL
            self.study.tell(trial, state=state)


@dataclass(frozen=True)
class _Wanted:
    """A configuration to try in any case, with Optuna's parameters of the point of the space that stands for it, if one does."""

    job: JobConfig
    parameters: dict[str, Any] | None

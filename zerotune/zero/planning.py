"""``release: planned``: the first steps are measured, then it is chosen for every unit whether to keep it.

The engine begins as with ``after_use``. Once a step has followed its schedules from end to end, a few steps are
profiled, each for one thing: in line, where compute and communication do not disturb each other; as usual; and once
for the allocator. All ranks agree on the numbers, so each comes to the same choice by itself, after the same step.
Then the allocator is looked at again, and if the plan needs more than was predicted, it is chosen anew with what is
known now.

What is measured are the events that the executor is told of: :class:`Planner` listens in its place and passes them on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import fmean, median
from typing import Any

import torch

from zerotune.config.errors import UsageError
from zerotune.config.knobs import Knobs, Release
from zerotune.engine import RankGroup
from zerotune.engine.allocations import AllocationRecorder, allocation_recorder
from zerotune.models.marks import is_profiled
from zerotune.predict import Choice, EventLoad, choose, fit_link, replay
from zerotune.records import Link, PassProfile, Profile
from zerotune.schedule import Phase, ReleasePlan, Schedule
from zerotune.schedule.schedule import SavingReason
from zerotune.zero.comm import Communicator
from zerotune.zero.executor import Executor

logger = logging.getLogger(__name__)

TIMED_STEPS = 2
"""Steps timed in line, and as many as usual."""

LOOKS = 2
"""Steps in which the allocator is looked at; the least counts, for garbage in cycles may wait in one of them."""

MOST_CHECKS = 2
"""How often a plan may turn out to need more than its budget before everything is released after use."""

SETTLING_STEPS = 2 + 2 * TIMED_STEPS + LOOKS + MOST_CHECKS * LOOKS
"""Optimizer steps from the first until the choice is final, if all of them run alike."""

MOST_IRREGULAR = 20
"""Steps that do not run alike before the choice is given up."""


def plans_release(knobs: Knobs) -> bool:
    """Whether these knobs leave the choice to a planner.

    Raises:
        UsageError: They do, and say no budget.
    """
    if knobs.stage != 3 or knobs.release is not Release.PLANNED:
        return False
    if knobs.memory_budget is None:
        raise UsageError(
            "release: planned needs a memory_budget", "add it, for example memory_budget=40 * 2**30"
        )
    return True


class _Stage(Enum):
    """What the step under way is for."""

    RECORD = auto()  # until a step follows its schedules
    ALONE = auto()  # times, with communication in line
    BESIDE = auto()  # times, with communication as the knobs say
    MEMORY = auto()  # bytes
    CHECK = auto()  # bytes under the plan
    SETTLED = auto()


@dataclass
class _Pass:
    """One pass that followed a schedule, event by event.

    Attributes:
        schedule: What it followed.
        before: The clock when each event came.
        after: The clock when its actions had been carried out.
    """

    schedule: Schedule
    before: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.before) == len(self.schedule.actions)


@dataclass
class _Times:
    """Seconds of all passes of one order: a row for each pass, a number for each event."""

    acting: list[list[float]] = field(default_factory=list)
    computing: list[list[float]] = field(default_factory=list)


class Planner:
    """Profiles the first steps and chooses (see the module's text). Afterwards it only passes events on.

    Args:
        executor: Whom events are passed on to.
        comm: Runs in line for some steps.
        group: The ranks; all must agree.
        knobs: Resolved knobs, with a budget.
        itemsizes: Bytes of an element that is gathered, and of one that is reduced.
        reduces: Whether passes reduce their gradients.
        use_plan: Goes on with a plan.
        flush: Empties pools; returns the bytes that are at rest then.
    """

    def __init__(
        self,
        executor: Executor,
        comm: Communicator,
        group: RankGroup,
        knobs: Knobs,
        itemsizes: tuple[int, int],
        reduces: bool,
        use_plan: Callable[[ReleasePlan], None],
        flush: Callable[[], int],
    ) -> None:
        assert knobs.memory_budget is not None
        self._executor = executor
        self._comm = comm
        self._group = group
        self._knobs = knobs
        self._budget = knobs.memory_budget
        self._itemsizes = itemsizes
        self._reduces = reduces
        self._use_plan = use_plan
        self._flush = flush
        self._clock = _CudaClock(group.device) if group.device.type == "cuda" else _HostClock()
        self._stage = _Stage.RECORD
        self._left = 1  # steps left in this stage
        self._checks = 0
        self._irregular = 0
        self._recorder: AllocationRecorder | None = None
        self._passes: list[_Pass] = []
        self._is_regular = True
        self._began_s = 0.0
        self._began: Any = None  # the clock when the pass under way began
        self._orders: list[Schedule] = []  # of the passes of the steps that are profiled
        self._layout = executor.layout  # without what a plan makes persistent
        self._times: dict[_Stage, dict[str, _Times]] = {_Stage.ALONE: {}, _Stage.BESIDE: {}}
        self._step_s: list[float] = []
        self._usual_s = 0.0
        self._held: list[int] = []  # interval by interval, of the looks so far
        self._profile: Profile | None = None
        self._choice: Choice | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the choice is final."""
        return self._stage is _Stage.SETTLED

    # ------------------------------------------------------------------------------------------ what hooks report

    def begin_forward(self, module: torch.nn.Module) -> None:
        self._began = self._clock.stamp()
        self._executor.begin_forward(module)

    def end_forward(self) -> None:
        self._executor.end_forward()

    def enter(self, phase: Phase, scope: str, units: tuple[int, ...]) -> None:
        if self._stage is _Stage.SETTLED:
            self._executor.enter(phase, scope, units)
            return
        before = self._stamp()
        self._executor.enter(phase, scope, units)
        self._note(before)

    def exit(self, phase: Phase, scope: str, units: tuple[int, ...]) -> None:
        if self._stage is _Stage.SETTLED:
            self._executor.exit(phase, scope, units)
            return
        before = self._stamp()
        self._executor.exit(phase, scope, units)
        self._note(before)

    def _stamp(self) -> Any:
        if self._recorder is not None:
            self._recorder.mark()
        return self._clock.stamp()

    def _note(self, before: Any) -> None:
        """An event has been dealt with: on schedule, or this step is no example."""
        after = self._stamp()
        position = self._executor.position
        if position is None:
            self._is_regular = False
            return
        schedule, index = position
        if index == 0:
            before = self._began  # the opening has been issued since
            self._is_regular &= not self._passes or self._passes[-1].is_whole
            self._passes.append(_Pass(schedule))
        if not self._passes or self._passes[-1].schedule is not schedule:
            self._is_regular = False
            return
        self._passes[-1].before.append(before)
        self._passes[-1].after.append(after)

    # ------------------------------------------------------------------------------------------- between two steps

    def after_step(self) -> None:
        """An optimizer step is over; collective while the choice is not final."""
        if self._stage is _Stage.SETTLED:
            return
        self._clock.synchronize()
        seconds = time.perf_counter() - self._began_s
        held = self._stop_recorder()
        if not (self._is_alike_everywhere() and self._take(seconds, held)):
            self._irregular += 1
            if self._irregular > MOST_IRREGULAR:
                self._give_up("steps do not run alike, or a profiler runs in all of them")
        self._begin_step()

    def close(self) -> None:
        """Stop measuring."""
        self._stop_recorder()
        self._stage = _Stage.SETTLED

    def _begin_step(self) -> None:
        self._passes = []
        self._is_regular = True
        self._comm.overlaps = self._knobs.overlap_comm and self._stage is not _Stage.ALONE
        if self._stage in (_Stage.ALONE, _Stage.MEMORY, _Stage.CHECK):
            at_rest = self._flush()  # the opening belongs to what is measured
            # There can be one profiler at a time, and the user's may run.
            if self._stage is not _Stage.ALONE and not is_profiled():
                self._recorder = allocation_recorder(self._group.device, at_rest)
                self._recorder.start()
        self._began_s = time.perf_counter()

    def _stop_recorder(self) -> list[int] | None:
        recorder, self._recorder = self._recorder, None
        return None if recorder is None else recorder.stop()

    def _is_alike_everywhere(self) -> bool:
        """Whether on every rank the step followed schedules, those of the steps before it."""
        orders = [one.schedule for one in self._passes]
        is_fine = self._is_regular and bool(orders) and all(one.is_whole for one in self._passes)
        if self._stage is not _Stage.RECORD:
            is_fine &= self._executor.layout == self._executor.plan.layout(self._layout)
            is_fine &= [one.trace.digest for one in orders] == [one.trace.digest for one in self._orders]
        return all(row[0] for row in self._group.gather_numbers([float(is_fine)]))

    def _take(self, seconds: float, held: list[int] | None) -> bool:
        """Take the figures of a step that was as it should be, and go on to the next stage when there are enough.

        Returns:
            Whether it has any: bytes may not have been looked at.
        """
        self._orders = [one.schedule for one in self._passes]
        match self._stage:
            case _Stage.ALONE | _Stage.BESIDE:
                self._add_times()
                if self._stage is _Stage.BESIDE:
                    self._step_s.append(seconds)
            case _Stage.MEMORY | _Stage.CHECK:
                if not self._agree_on_bytes(held):
                    return False
        self._left -= 1
        if self._left > 0:
            return True
        match self._stage:
            case _Stage.RECORD:
                self._layout = self._executor.layout
                self._stage, self._left = _Stage.ALONE, TIMED_STEPS
            case _Stage.ALONE:
                self._stage, self._left = _Stage.BESIDE, TIMED_STEPS
            case _Stage.BESIDE:
                self._agree_on_times()
                self._stage, self._left = _Stage.MEMORY, LOOKS
            case _Stage.MEMORY:
                self._choose()
            case _Stage.CHECK:
                self._check()
        return True

    # ------------------------------------------------------------------------------------------------ the profile

    def _add_times(self) -> None:
        for one in self._passes:
            times = self._times[self._stage].setdefault(one.schedule.trace.digest, _Times())
            seconds = self._clock.seconds
            times.acting.append([seconds(b, a) for b, a in zip(one.before, one.after, strict=True)])
            gaps = [seconds(a, b) for a, b in zip(one.after, one.before[1:], strict=False)]
            times.computing.append([*gaps, 0.0])

    def _kinds(self) -> dict[str, tuple[Schedule, int]]:
        """The orders of a step's passes, each with its schedule and how often it comes."""
        kinds: dict[str, tuple[Schedule, int]] = {}
        for schedule in self._orders:
            digest = schedule.trace.digest
            kinds[digest] = (schedule, kinds[digest][1] + 1 if digest in kinds else 1)
        return kinds

    def _agree_on_times(self) -> None:
        """Of compute, the slowest rank's seconds; of communication those of the rank that came to it last."""
        kinds = self._kinds()
        shares = [self._executor.left_out.get(unit, 0.0) for unit in range(len(self._layout.units))]
        numbers = [min(self._step_s), *shares]
        for digest in kinds:
            alone, beside = (self._times[stage][digest] for stage in (_Stage.ALONE, _Stage.BESIDE))
            computing = _medians(alone.computing)
            stolen = sum(_medians(beside.computing)) - sum(computing)
            numbers += [stolen, *_medians(alone.acting), *computing]
        rows = self._group.gather_numbers(numbers)
        columns = list(zip(*rows, strict=True))
        step_s, at = max(columns[0]), 1 + len(shares)
        left_out = tuple(map(fmean, columns[1:at])) if any(map(any, columns[1:at])) else ()
        passes: list[PassProfile] = []
        loads: list[EventLoad] = []
        alone_s: list[float] = []
        stolen_s = 0.0
        unknown = self._profile_of(step_s, Link(), (), left_out)
        for digest, (schedule, count) in kinds.items():
            events = len(schedule.actions)
            stolen_s += fmean(columns[at])
            alone_s += [min(column) for column in columns[at + 1 : at + 1 + events]]
            compute_s = tuple(max(column) for column in columns[at + 1 + events : at + 1 + 2 * events])
            at += 1 + 2 * events
            loads += replay(schedule, self._executor.layout, compute_s, unknown).loads[:-1]
            passes.append(PassProfile(order=digest, count=count, compute_s=compute_s))
        link = fit_link(loads, alone_s, stolen_s if self._knobs.overlap_comm else 0.0)
        self._profile = self._profile_of(step_s, link, tuple(passes), left_out)
        self._usual_s = step_s

    def _profile_of(
        self, step_s: float, link: Link, passes: tuple[PassProfile, ...], left_out: tuple[float, ...]
    ) -> Profile:
        gathered, reduced = self._itemsizes
        return Profile(
            step_s=step_s,
            link=link,
            passes=passes,
            gather_itemsize=gathered,
            reduce_itemsize=reduced,
            overlaps=self._knobs.overlap_comm,
            left_out=left_out,
            gathered_rows=self._comm.rows_received,
            copies_gradients=not self._comm.carries_pieces,
        )

    def _agree_on_bytes(self, held: list[int] | None) -> bool:
        """Put the largest rank's bytes into the profile, the least of all looks; false if some rank could not look."""
        assert self._profile is not None
        acting: dict[str, list[int]] = {}
        computing: dict[str, list[int]] = {}
        events = sum(len(schedule.actions) for schedule in self._orders)
        if held is None or len(held) != 2 * events + 1:
            held = [-1] * (2 * events + 1)
        rows = self._group.gather_numbers([float(nbytes) for nbytes in held])
        if any(row[0] < 0 for row in rows):
            return False
        most = [int(max(column)) for column in zip(*rows, strict=True)]
        if self._left < LOOKS:
            most = [min(pair) for pair in zip(most, self._held, strict=True)]
        self._held = list(most)
        # An interval begins before and one after the actions of each event. What came before the first event counts
        # with what came after the last: nothing is live there.
        most[-1] = max(most[0], most[-1])
        at = 1
        for schedule in self._orders:
            digest, events = schedule.trace.digest, len(schedule.actions)
            intervals = most[at : at + 2 * events]
            at += 2 * events
            acting[digest] = _largest(acting.get(digest), intervals[0::2])
            computing[digest] = _largest(computing.get(digest), intervals[1::2])
        passes = [
            one.model_copy(
                update={
                    "acting_bytes": tuple(acting[one.order]),
                    "computing_bytes": tuple(computing[one.order]),
                }
            )
            for one in self._profile.passes
        ]
        self._profile = self._profile.model_copy(update={"passes": tuple(passes)})
        return True

    # ------------------------------------------------------------------------------------------------- the choice

    def _choose(self) -> None:
        """Choose with what is known, and go on with the plan."""
        assert self._profile is not None
        schedules = [schedule for schedule, _ in self._kinds().values()]
        plan = self._executor.plan
        choice = choose(
            schedules, self._profile, self._knobs, self._layout, self._budget, self._reduces, plan
        )
        if choice is not None:
            self._choice = choice
            self._use_plan(choice.plan)
            self._stage, self._left = _Stage.CHECK, LOOKS
        elif plan == ReleasePlan():
            self._settle(
                f"memory_budget {_mib(self._budget)} cannot be met: with every unit released after use a rank "
                f"allocates {_mib(self._profile.peak_bytes)}",
                logging.WARNING,
            )
        else:
            self._give_up(self._nothing_fits)

    def _check(self) -> None:
        """Does the plan keep within the budget? If not, choose again, from what it was seen to need."""
        assert self._profile is not None and self._choice is not None
        peak = self._profile.peak_bytes
        if peak <= self._budget:
            self._settle(self._in_words(self._choice, peak))
            return
        self._checks += 1
        # What was followed is the plan now, and takes what it was predicted to.
        self._profile = self._profile.model_copy(update={"step_s": self._choice.seconds})
        if self._checks < MOST_CHECKS:
            self._choose()
        else:
            self._give_up(self._nothing_fits)

    @property
    def _nothing_fits(self) -> str:
        return f"no plan was found that keeps within memory_budget {_mib(self._budget)}"

    def _give_up(self, why: str) -> None:
        if self._executor.plan != ReleasePlan():
            self._use_plan(ReleasePlan())
        self._settle(f"{why}: every unit is released after use", logging.WARNING)

    def _settle(self, line: str, level: int = logging.INFO) -> None:
        self._stage = _Stage.SETTLED
        if self._group.rank == 0:
            logger.log(level, "release: planned: %s", line)

    def _in_words(self, choice: Choice, peak: int) -> str:
        layout = self._executor.layout
        kept = {
            saving.unit
            for schedule in self._orders
            for saving in schedule.savings
            if saving.reason == SavingReason.KEPT
        }
        persistent = self._executor.plan.persistent
        gathered = len(layout.units) - len(layout.persistent_units)
        return (
            f"keeps {len(kept)} of {gathered + len(persistent)} units until backward, persists {len(persistent)}, "
            f"releases {gathered - len(kept)}: predicted {choice.seconds * 1e3:.0f} ms a step instead of "
            f"{self._usual_s * 1e3:.0f} ms, {_mib(peak)} of {_mib(self._budget)}"
        )


class _HostClock:
    """Where operations have run when they return."""

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def synchronize(self) -> None:
        """Nothing is under way."""


class _CudaClock:
    """The clock of the current stream, which waits for communication where compute does.

    Args:
        device: Whose stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """For each event the median over passes."""
    return [median(column) for column in zip(*rows, strict=True)]


def _largest(known: list[int] | None, new: list[int]) -> list[int]:
    return new if known is None else [max(pair) for pair in zip(known, new, strict=True)]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"

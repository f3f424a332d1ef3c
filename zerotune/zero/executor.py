"""Carrying out schedules: what the hooks report goes in, gathers, releases and reductions come out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zerotune.config.errors import UsageError
from zerotune.config.knobs import Knobs
from zerotune.engine import LedgerKeeper
from zerotune.schedule import (
    Action,
    Bucket,
    Collect,
    Drain,
    Event,
    EventKind,
    Gather,
    Layout,
    OnDemand,
    PassKey,
    Phase,
    Reason,
    Reduce,
    Release,
    ReleasePlan,
    Schedule,
    Wait,
)
from zerotune.zero.collector import Collector
from zerotune.zero.gatherer import Gatherer
from zerotune.zero.passes import Pass, ScheduleBook

_REMEMBERED = 64
"""Schedules that are remembered event by event."""


@dataclass(frozen=True, slots=True)
class _Step:
    """An event that a schedule expects, and what is to be done at it: all that can be known before it happens.

    Attributes:
        kind, phase, scope, units: The event.
        calls: Its actions.
        needed: At an entry, units whose weights it reads.
        watched: Units whose parameters are watched for reads: at an entry those that it uses, at an exit those of which no
            use is open any more.
    """

    kind: EventKind
    phase: Phase
    scope: str
    units: tuple[int, ...]
    calls: list[Callable[[], None]]
    needed: list[int]
    watched: list[int]


@dataclass(frozen=True)
class _Steps:
    """A schedule, event by event."""

    schedule: Schedule
    steps: list[_Step]


class Executor:
    """Listens to uses (:class:`zerotune.models.uses.UseListener`) and does what the schedule says.

    A pass with gradients lasts from the first forward to the end of backward, however many forwards come before it; a
    pass without gradients lasts for one forward, and may run inside one with gradients (a teacher, an evaluation).

    Args:
        knobs: Resolved knobs.
        layout: The model's units.
        gatherer: Carries out gathers and releases.
        reducer: Carries out reductions.
        ledger: Logs the uses.
        reduces_in_pass: Whether gradients are reduced in every pass; otherwise by :meth:`reduce_accumulated`.
        watch_access: Makes the context in which reads of parameters are reported to :meth:`on_access`.
        before_window: Called before the first pass of an accumulation window.

    Attributes:
        plan: What is kept of every unit; changed by :meth:`use_plan`.
    """

    def __init__(
        self,
        knobs: Knobs,
        layout: Layout,
        gatherer: Gatherer,
        reducer: Collector,
        ledger: LedgerKeeper,
        reduces_in_pass: bool,
        watch_access: Callable[[], AbstractContextManager[object]],
        before_window: Callable[[], None],
    ) -> None:
        self._knobs = knobs
        self._gatherer = gatherer
        self._reducer = reducer
        self._ledger = ledger
        self._reduces_in_pass = reduces_in_pass
        self._watch_access = watch_access
        self._before_window = before_window
        self._watching: AbstractContextManager[object] | None = None
        self._passes: list[Pass] = []
        self._nested_forwards = 0
        self._is_acting = False
        self._was_cut_short = False
        self._window_key: PassKey | None = None
        self._opened: tuple[Gather, ...] = ()
        self._following: list[_Step] = []
        self.window_position = 0
        self.plan = ReleasePlan.of_knobs(knobs, len(layout.units))
        self.digests: list[str] = []
        self.use_layout(layout)

    def use_layout(self, layout: Layout) -> None:
        """Go on with other sizes or flags: what was recorded under the old ones no longer holds."""
        self.layout = layout
        self._on_demand = OnDemand(self._knobs, layout)
        self._steps: dict[int, _Steps] = {}
        self.book = ScheduleBook(self._knobs, layout, self._reduces_in_pass, self.plan)
        for current in self._passes:
            if current.schedule is not None:
                current.leave()
                self._reducer.abandon()
            current.is_regular = False

    def use_plan(self, plan: ReleasePlan, layout: Layout) -> None:
        """Go on with another choice for every unit, between passes; recorded orders hold on."""
        assert self.is_idle
        self.plan = plan
        self.layout = layout
        self._on_demand = OnDemand(self._knobs, layout)
        self._steps = {}
        self.book = self.book.under(plan, layout)

    # ------------------------------------------------------------------------------------- what hooks report

    def begin_forward(self, module: nn.Module) -> None:
        """The root's forward begins: a new pass, or one more forward of the pass that is open."""
        key = PassKey(torch.is_grad_enabled(), module.training, self.window_position)
        current = self._passes[-1] if self._passes else None
        if current is not None and not current.key.grad_enabled:
            self._nested_forwards += 1  # the root calls itself
            return
        if current is not None and key.grad_enabled:
            return
        self._begin(key)

    def begin_backward(self, module: nn.Module) -> None:
        """Gradients are about to be propagated; without an open pass (a second backward) it is a pass of its own."""
        if not self._passes:
            self._begin(PassKey(True, module.training, self.window_position))

    def end_forward(self) -> None:
        """The root's forward has returned: a pass without gradients is over."""
        current = self._passes[-1]
        if current.key.grad_enabled:
            return
        if self._nested_forwards:
            self._nested_forwards -= 1
            return
        self._finish()

    def enter(self, phase: Phase, scope: str, units: tuple[int, ...]) -> None:
        step = self._expected(EventKind.ENTER, phase, scope, units)
        if step is None:
            self._complete_for(self._note(EventKind.ENTER, phase, scope, units))
            self._gatherer.expose(units)
        else:
            if step.calls:
                self._run(step.calls)
            if step.needed and not self._gatherer.complete.issuperset(step.needed):
                self._complete_for(Event(EventKind.ENTER, phase, scope, units))
            if step.watched:
                self._gatherer.expose(step.watched)
        if self._ledger.is_recording:
            self._ledger.begin_use(phase, scope)

    def exit(self, phase: Phase, scope: str, units: tuple[int, ...]) -> None:
        if self._ledger.is_recording:
            self._ledger.end_use(phase, scope)
        step = self._expected(EventKind.EXIT, phase, scope, units)
        if step is not None:
            if step.watched:
                self._gatherer.conceal(step.watched)
            if step.calls:
                self._run(step.calls)
            return
        event = self._note(EventKind.EXIT, phase, scope, units)
        open_uses = self._open_everywhere()
        self._gatherer.conceal([unit for unit in units if not open_uses.get(unit)])
        self._do(self._on_demand.after(event, self._gatherer.complete, open_uses))

    def _expected(self, kind: EventKind, phase: Phase, scope: str, units: tuple[int, ...]) -> _Step | None:
        """What to do at an event, if it is the one that the schedule has next; then it counts as happened.

        A pass inside another follows none.
        """
        passes = self._passes
        if len(passes) != 1:
            return None
        current = passes[0]
        index = current.next_event
        if current.schedule is None or index == len(self._following):
            return None
        step = self._following[index]
        if step.scope == scope and step.kind is kind and step.phase is phase and step.units == units:
            current.next_event = index + 1
            return step
        return None

    def _note(self, kind: EventKind, phase: Phase, scope: str, units: tuple[int, ...]) -> Event:
        """An event that no schedule has here; if the pass followed one, it leaves it."""
        event = Event(kind, phase, scope, units)
        self._current(scope).note(event, self._leave)
        return event

    def _complete_for(self, event: Event) -> None:
        self._do(self._on_demand.before(event, self._gatherer.complete, self._gatherer.in_flight))

    def on_access(self, unit: int) -> bool:
        """An operation is about to read a unit's parameters; off schedule only.

        Returns:
            Whether this is a use that no hook announced. The unit is complete by then, and open until whoever reads
            it ends.
        """
        if self._is_acting or not self._passes or unit in self.layout.persistent_units:
            return False
        if self._open_everywhere().get(unit):
            return False
        self._do([Gather((unit,), Reason.DEMAND, "access"), Wait((unit,))])
        return True

    def hold(self, unit: int) -> None:
        """Count a discovered use as open; the exit of the module that reads it closes it."""
        current = self._passes[-1]
        current.open_uses[unit] = current.open_uses.get(unit, 0) + 1

    # ----------------------------------------------------------------------------------- what the engine says

    def end_backward(self) -> None:
        """Backward has returned and every use is closed: reduce what is left and end the pass."""
        current = self._passes[-1]
        if self._reduces_in_pass:
            if current.is_complete:
                assert current.schedule is not None
                self._do(current.schedule.at_end, current.schedule.buckets)
                left = self._reducer.late()
            else:
                self._reducer.abandon()
                left = self._reducer.uncollected()
            if left:
                buckets, actions = self._on_demand.reductions(left)
                self._do(actions, buckets)
            self._reducer.end_pass()
        self._finish()

    def reduce_accumulated(self) -> None:
        """Reduce the gradients that the window's passes left where they are."""
        buckets, actions = self._on_demand.reductions(self._reducer.uncollected())
        self._do(actions, buckets)
        self._reducer.end_pass()

    @property
    def next_opening(self) -> tuple[Gather, ...]:
        """What the first pass of the next window begins with, if it is like that of this one."""
        if self._window_key is None or not self._knobs.overlap_comm:
            return ()
        candidates = self.book.candidates(self._window_key)
        return candidates[0].opening if candidates else ()

    def open_next_window(self) -> None:
        """Issue the first gathers of the next window: their shards hold what it is to use."""
        self._opened = self.next_opening
        self._do(self._opened)

    def finish_open_passes(self) -> None:
        """End passes that had no backward: free what they hold."""
        while self._passes:
            self._passes[-1].is_regular = False  # an unfinished pass is no order to learn
            self._finish()

    def passes_cut_short(self) -> None:
        """Forget the passes that an exception cut short; what they gathered goes with the next flush or pass.

        Nothing is waited for here: on an error in one rank the others may never answer.
        """
        self._stop_watching()
        self._gatherer.conceal(self._open_everywhere())
        self._passes.clear()
        self._nested_forwards = 0
        self._was_cut_short = True

    def drop_what_was_cut_short(self) -> None:
        """Free what passes that were cut short had gathered, once all ranks are known to go on."""
        if self._was_cut_short:
            self._was_cut_short = False
            self.drop_opening()

    def drop_opening(self) -> None:
        """Free all that is full or in flight between passes."""
        self._opened = ()
        self._gatherer.release_all()

    @property
    def position(self) -> tuple[Schedule, int] | None:
        """The schedule that the latest event was on, and the event's index; ``None`` if it was on none."""
        if not self._passes or self._passes[-1].schedule is None:
            return None
        return self._passes[-1].schedule, self._passes[-1].next_event - 1

    @property
    def left_out(self) -> Mapping[int, float]:
        """Share of the bytes of each unit's latest reduction that need not be sent; of a unit that is missing, none."""
        return self._reducer.left_out

    @property
    def is_idle(self) -> bool:
        """Whether no pass is under way."""
        return not self._passes

    def reset(self) -> None:
        """Forget everything under way, and free what it held."""
        self.passes_cut_short()
        self._reducer.clear()
        self.drop_opening()

    def forget(self) -> None:
        """Let go of what is remembered of a model that is no more."""
        self._steps.clear()
        self._following = []

    # ------------------------------------------------------------------------------------------------ inside

    def _begin(self, key: PassKey) -> None:
        if not self._passes and key.window_position == 0:
            self._before_window()
        # Inside another pass some units may be live already, which no recorded order foresees.
        candidates = [] if self._passes else self.book.candidates(key)
        schedule = candidates[0] if candidates else None
        if not self._passes:
            if key.grad_enabled and key.window_position == 0:
                self._window_key = key
            if self._opened and (schedule is None or schedule.opening != self._opened):
                self.drop_opening()  # another pass than was expected
            self._opened = ()
        self._passes.append(Pass(key, schedule))
        if schedule is not None:
            self._following = self._steps_of(schedule)
            self._do(schedule.opening)
        if not candidates:
            self._start_watching()

    def _start_watching(self) -> None:
        if self._watching is None:
            self._watching = self._watch_access()
            self._watching.__enter__()

    def _stop_watching(self) -> None:
        if self._watching is not None:
            watching, self._watching = self._watching, None
            watching.__exit__(None, None, None)

    def _current(self, scope: str) -> Pass:
        if not self._passes:
            raise UsageError(
                f"{scope} is used outside a forward pass of the whole model",
                "call the engine, not a part of the model: let its forward choose the part",
            )
        return self._passes[-1]

    def _leave(self) -> None:
        """The pass has left its recorded order. What was collected is reduced; what is in flight is used or dropped."""
        self._reducer.abandon()

    def _finish(self) -> None:
        current = self._passes.pop()
        open_uses = self._open_everywhere()
        if not current.is_complete:  # else every use has been closed
            self._gatherer.conceal(unit for unit in current.open_uses if not open_uses.get(unit))
        self.digests.append(current.digest())
        if self._passes:
            # Inside another pass: free only what that one does not use; its next entries gather what it misses.
            self._gatherer.release(
                [unit for unit in sorted(self._gatherer.complete) if not open_uses.get(unit)]
            )
            return
        self._stop_watching()
        self._gatherer.release_all()
        if current.is_complete and current.schedule is not None:
            self.book.reuse(current.key, current.schedule)
        elif current.events and current.is_regular:
            self.book.learn(current.key, current.events)

    def _open_everywhere(self) -> dict[int, int]:
        if len(self._passes) == 1:
            return self._passes[0].open_uses
        total: dict[int, int] = {}
        for current in self._passes:
            for unit, count in current.open_uses.items():
                total[unit] = total.get(unit, 0) + count
        return total

    def _do(self, actions: Sequence[Action], buckets: tuple[Bucket, ...] = ()) -> None:
        self._run([self._call_of(action, buckets) for action in actions])

    def _steps_of(self, schedule: Schedule) -> list[_Step]:
        """A schedule, event by event; worked out when it is followed for the first time."""
        found = self._steps.get(id(schedule))
        if found is None or found.schedule is not schedule:
            if len(self._steps) >= _REMEMBERED:
                self._steps.clear()  # of schedules that are long gone
            found = self._steps[id(schedule)] = _Steps(schedule, list(self._work_out(schedule)))
        return found.steps

    def _work_out(self, schedule: Schedule) -> Iterator[_Step]:
        open_uses: Counter[int] = Counter()
        for event, actions in zip(schedule.trace.events, schedule.actions, strict=True):
            is_entry = event.kind is EventKind.ENTER
            (open_uses.update if is_entry else open_uses.subtract)(event.units)
            yield _Step(
                event.kind,
                event.phase,
                event.scope,
                event.units,
                [self._call_of(action, schedule.buckets) for action in actions],
                self._on_demand.needed(event) if is_entry else [],
                [u for u in event.units if self._gatherer.watches(u) and (is_entry or not open_uses[u])],
            )

    def _run(self, calls: Sequence[Callable[[], None]]) -> None:
        self._is_acting = True
        try:
            for call in calls:
                call()
        finally:
            self._is_acting = False

    def _call_of(self, action: Action, buckets: tuple[Bucket, ...]) -> Callable[[], None]:
        """What carries out an action; made once for every action of a schedule."""
        match action:
            case Gather(units=units, purpose=purpose):
                return partial(self._gatherer.gather, units, purpose)
            case Wait(units=units):
                return partial(self._gatherer.wait, units)
            case Release(units=units):
                return partial(self._gatherer.release, units)
            case Collect(bucket=bucket, params=params):
                return partial(self._reducer.collect, bucket, buckets[bucket], params)
            case Reduce(bucket=bucket):
                return partial(self._reducer.reduce, bucket)
            case Drain(keep=keep):
                return partial(self._reducer.drain, keep)

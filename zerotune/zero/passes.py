"""Following recorded orders: which schedule a pass follows, and what happens when it leaves it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from zerotune.config.knobs import Knobs
from zerotune.schedule import (
    Event,
    EventKind,
    Layout,
    PassKey,
    ReleasePlan,
    Schedule,
    Trace,
    compile_schedule,
)

MAX_RECORDED_EVENTS = 200_000
"""A pass longer than this (many forwards without a backward) is not recorded: it follows the on-demand policy."""

MAX_ORDERS_PER_KEY = 8
"""Recorded orders kept side by side for one kind of pass; the one unused longest is dropped."""


class ScheduleBook:
    """Schedules of the orders that were recorded, by kind of pass, most recently used first.

    Args:
        knobs: Resolved knobs.
        layout: The model's units.
        reduces: Whether passes reduce their gradients.
        plan: What to keep, in place of what the knobs say of all units.
    """

    def __init__(
        self, knobs: Knobs, layout: Layout, reduces: bool = True, plan: ReleasePlan | None = None
    ) -> None:
        self._knobs = knobs
        self._layout = layout
        self._reduces = reduces
        self._plan = plan
        self._orders: dict[PassKey, list[Schedule]] = {}

    @property
    def schedules(self) -> list[Schedule]:
        """All of them, each once."""
        return list({id(order): order for orders in self._orders.values() for order in orders}.values())

    def candidates(self, key: PassKey) -> list[Schedule]:
        """Schedules that a pass may follow: of its own kind, else of another position in the window."""
        own = self._orders.get(key)
        if own:
            return list(own)
        return [
            order
            for other, orders in self._orders.items()
            if (other.grad_enabled, other.training) == (key.grad_enabled, key.training)
            for order in orders
        ]

    def reuse(self, key: PassKey, schedule: Schedule) -> None:
        """Note that a pass followed a schedule to its end, so that the next pass of its kind tries it first."""
        orders = self._orders.setdefault(key, [])
        if not (orders and orders[0] is schedule):
            orders[:] = [schedule, *(order for order in orders if order is not schedule)][:MAX_ORDERS_PER_KEY]

    def learn(self, key: PassKey, events: list[Event]) -> Schedule:
        """Keep the order of a finished pass; compiled once, then moved to the front whenever it recurs."""
        orders = self._orders.setdefault(key, [])
        trace = Trace.of(events)
        for position, order in enumerate(orders):
            if order.trace.events == trace.events:
                orders.insert(0, orders.pop(position))
                return order
        schedule = self._compile(trace)
        orders.insert(0, schedule)
        del orders[MAX_ORDERS_PER_KEY:]
        return schedule

    def under(self, plan: ReleasePlan, layout: Layout) -> ScheduleBook:
        """A book of the same orders, compiled under another plan."""
        book = ScheduleBook(self._knobs, layout, self._reduces, plan)
        compiled = {id(order): book._compile(order.trace) for order in self.schedules}
        book._orders = {
            key: [compiled[id(order)] for order in orders] for key, orders in self._orders.items()
        }
        return book

    def _compile(self, trace: Trace) -> Schedule:
        return compile_schedule(trace, self._knobs, self._layout, self._reduces, self._plan)


@dataclass
class Pass:
    """One pass under way.

    Attributes:
        key: Its kind.
        schedule: What it follows; ``None`` once it has left every recorded order.
        left: Events so far of a pass that follows no schedule; empty while it follows one.
        next_event: Index of the next event of ``schedule``; whoever sees that it happened adds 1.
        is_regular: Whether its order may be recorded: no use was discovered in its middle.
    """

    key: PassKey
    schedule: Schedule | None
    left: list[Event] = field(default_factory=list)
    next_event: int = 0
    is_regular: bool = True
    _open_uses: dict[int, int] = field(default_factory=dict)
    _counted: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether it has followed its schedule to the last event."""
        return self.schedule is not None and self.next_event == len(self.schedule.trace.events)

    @property
    def events(self) -> list[Event]:
        """What has happened so far."""
        return self.left if self.schedule is None else list(self.schedule.trace.events[: self.next_event])

    @property
    def open_uses(self) -> dict[int, int]:
        """Uses of each unit that are open. On schedule they are counted only when somebody asks."""
        if self.schedule is not None:
            for event in self.schedule.trace.events[self._counted : self.next_event]:
                self._count(event)
            self._counted = self.next_event
        return self._open_uses

    def leave(self) -> None:
        """Follow the schedule no longer."""
        self._open_uses = self.open_uses  # counted up to here
        self.left = self.events
        self.schedule = None

    def note(self, event: Event, on_leave: Callable[[], None]) -> None:
        """Note an event that the schedule does not have here, if there is one.

        Args:
            event: What happened.
            on_leave: Called if the pass has followed its schedule until now.
        """
        leaves = self.schedule is not None
        if leaves:
            self.leave()
        self._count(event)
        if len(self.left) < MAX_RECORDED_EVENTS:
            self.left.append(event)
        if leaves:
            on_leave()

    def _count(self, event: Event) -> None:
        change = 1 if event.kind is EventKind.ENTER else -1
        for unit in event.units:
            self._open_uses[unit] = self._open_uses.get(unit, 0) + change

    def digest(self) -> str:
        """Hash of what was done, to be compared over ranks."""
        if self.is_complete:
            assert self.schedule is not None
            return self.schedule.digest
        hasher = hashlib.sha256(b"on demand")
        for event in self.events:
            hasher.update(f"{event.kind}|{event.phase}|{event.units}".encode())
        return hasher.hexdigest()

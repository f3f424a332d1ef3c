"""What a pass uses, in order: the events that a schedule is compiled from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class EventKind(StrEnum):
    """Whether a use begins or ends."""

    __hash__ = str.__hash__  # that of Enum is Python code, and these are keys in every event

    ENTER = "enter"
    EXIT = "exit"


class Phase(StrEnum):
    """What the units are used for. ``RECOMPUTE`` is a forward pass inside backward (activation checkpointing)."""

    __hash__ = str.__hash__  # that of Enum is Python code, and these are keys in every event

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Event:
    """Entry to or exit from the use of a set of units.

    Attributes:
        kind: Entry or exit.
        phase: Forward or backward.
        scope: Name of the module that uses them.
        units: Indices of the units used.
    """

    kind: EventKind
    phase: Phase
    scope: str
    units: tuple[int, ...]


@dataclass(frozen=True)
class PassKey:
    """What kind of pass a trace was recorded in; the same on every rank."""

    grad_enabled: bool
    training: bool
    window_position: int


@dataclass(frozen=True)
class Trace:
    """The events of one pass, in order.

    Uses may nest (a tied weight is used by the root while the blocks run) and may interleave (parallel branches in
    backward); every entry has one exit.
    """

    events: tuple[Event, ...]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Trace:
        return cls(tuple(events))

    @cached_property
    def digest(self) -> str:
        """Hash of the order, equal on all ranks that run alike."""
        hasher = hashlib.sha256()
        for event in self.events:
            hasher.update(f"{event.kind}|{event.phase}|{event.scope}|{event.units}\n".encode())
        return hasher.hexdigest()

    @property
    def has_backward(self) -> bool:
        return any(event.phase is Phase.BACKWARD for event in self.events)

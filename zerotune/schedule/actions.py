"""What a schedule tells the engine to do at an event."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zerotune.schedule.layout import ParamRef


class Reason(StrEnum):
    """Why a gather happens when it does."""

    DEMAND = "demand"
    PREFETCH = "prefetch"


@dataclass(frozen=True, slots=True)
class Gather:
    """Issue one AllGather for some units.

    Attributes:
        units: What it carries.
        reason: Needed now, or ahead of use.
        purpose: ``forward`` or ``backward``: the phase of the use it is for.
    """

    units: tuple[int, ...]
    reason: Reason
    purpose: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Make units complete before the event goes on."""

    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Free the full parameters of units."""

    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Collect:
    """Move full gradients into a reduce bucket, and free them.

    Attributes:
        bucket: Index into the schedule's buckets.
        params: Which of its members have become complete.
    """

    bucket: int
    params: tuple[ParamRef, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Issue the ReduceScatter of a bucket, all of whose members have been collected."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait until at most ``keep`` reductions are under way, adding the finished ones to the shards."""

    keep: int


Action = Gather | Wait | Release | Collect | Reduce | Drain

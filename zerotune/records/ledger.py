"""The ledger of one step: which bytes were alive, and every collective."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from zerotune.records.base import Record


class ByteClass(StrEnum):
    """What the bytes are for."""

    SHARD = "shard"
    FULL = "full"
    POOLED = "pooled"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"


class CollectiveKind(StrEnum):
    """Which collective, and for what."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"


class CollectiveEntry(Record):
    """One collective.

    Attributes:
        sequence: Its number in the order of issue, the same on every rank.
        kind: Which collective.
        purpose: ``forward``, ``backward``, ``refresh``, ``gradient``, ``norm``, ``setup``, …
        units: Names of the units it carries.
        elements: Elements of the full, padded tensor that it assembles or reduces.
        sent_bytes: Bytes that this rank sends of it.
        tag_bytes: Bytes that it sends beside them, to tell ranks that disagree.
        issued_s: When it was issued, seconds since the ledger began; negative if the step before issued it.
        waited_s: When something began to wait for it.
        done_s: When that wait ended.
    """

    sequence: int
    kind: CollectiveKind
    purpose: str
    units: tuple[str, ...]
    elements: int
    sent_bytes: int
    issued_s: float
    waited_s: float
    done_s: float
    tag_bytes: int = 0


class ByteSample(Record):
    """Bytes alive in one class after a change."""

    time_s: float
    byte_class: ByteClass
    bytes: int


class UseEntry(Record):
    """One use of units by a module: while it runs, what it waits for excluded.

    Attributes:
        scope: Name of the module.
        phase: ``forward``, ``recompute`` or ``backward``.
        begin_s: When its units were complete, seconds since the ledger began.
        end_s: When it ended.
    """

    scope: str
    phase: str
    begin_s: float
    end_s: float


class ReleaseEntry(Record):
    """The full parameters of a unit were freed."""

    unit: str
    time_s: float


class Ledger(Record):
    """Everything one rank recorded of one step.

    Attributes:
        rank: Whose.
        collectives: In the order of issue.
        samples: Bytes by class over time, in order of time.
        at_rest: Bytes by class before the step.
        peak: Largest bytes by class within the step.
        peak_live_elements: Largest number of live elements within the step.
        uses: In the order of their ends; a module's use encloses those of the modules inside it.
        releases: In order.
    """

    rank: int
    collectives: list[CollectiveEntry]
    samples: list[ByteSample]
    at_rest: dict[ByteClass, int]
    peak: dict[ByteClass, int]
    peak_live_elements: int
    uses: list[UseEntry] = Field(default_factory=list)
    releases: list[ReleaseEntry] = Field(default_factory=list)

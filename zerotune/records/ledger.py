"""The ledger of one step: which bytes were alive, and every collective."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from zerotune.records.base import Record


class ByteClass(StrEnum):
    """What the bytes are for.

    An engine counts the first five itself. The others are told apart in the allocator's own history of a step: what
    autograd saves for backward, results of operations that nothing saves (in backward: gradients on their way), and
    what remains.
    """

    __hash__ = str.__hash__  # that of Enum is Python code, and these are keys in every event

    SHARD = "shard"
    OPTIMIZER = "optimizer"
    FULL = "full"
    POOLED = "pooled"
    GRADIENT = "gradient"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    OTHER = "other"


class CollectiveKind(StrEnum):
    """Which collective, and for what."""

    __hash__ = str.__hash__  # that of Enum is Python code, and these are keys in every event

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
        left_out_bytes: Bytes of it that this rank need not send, for they are zeros.
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
    left_out_bytes: int = 0


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


class MemoryPoint(Record):
    """Bytes alive at one moment, by class; they add up to what the allocator had handed out."""

    time_s: float
    bytes: dict[ByteClass, int]


class OperationBytes(Record):
    """What one kind of operation had allocated and was alive at the peak.

    Attributes:
        operation: Name of the operation, or in backward of the graph node.
        byte_class: What it was for.
        count: Number of allocations.
        bytes: Of all of them.
    """

    operation: str
    byte_class: ByteClass
    count: int
    bytes: int


class MemoryHistory(Record):
    """The allocator's history of one untimed step, all of it explained.

    Times are seconds since that step began; a profiler ran, so they are no times of a step.

    Attributes:
        peak_bytes: The allocator's peak: what was at rest and the largest running sum of allocations.
        peak_s: When.
        at_peak: Bytes by class then.
        complete: Units whose full parameters were complete then.
        prefetched: Units whose gathers were under way then.
        prefetched_bytes: What these gathers' buffers took.
        operations: What had allocated activations, gradients and temporaries, the largest first.
        points: Bytes over time: of every stretch of time the moment when they were most.
        backward_s: When backward began.
    """

    peak_bytes: int
    peak_s: float
    at_peak: dict[ByteClass, int]
    complete: list[str]
    prefetched: list[str]
    prefetched_bytes: int
    operations: list[OperationBytes]
    points: list[MemoryPoint]
    backward_s: float | None


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
        memory: The allocator's history of another step, where one was profiled.
    """

    rank: int
    collectives: list[CollectiveEntry]
    samples: list[ByteSample]
    at_rest: dict[ByteClass, int]
    peak: dict[ByteClass, int]
    peak_live_elements: int
    uses: list[UseEntry] = Field(default_factory=list)
    releases: list[ReleaseEntry] = Field(default_factory=list)
    memory: MemoryHistory | None = None

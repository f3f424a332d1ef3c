"""How a run stands or ended."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """State of a run.

    ``OOM_DEVICE`` is the compute device's allocator, the CPU's included; ``OOM_HOST`` is MemoryError, the
    kernel's killer and Ray's.
    """

    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    OOM_DEVICE = "oom_device"
    OOM_HOST = "oom_host"
    TIMEOUT = "timeout"
    FAILED = "failed"
    LOST_NODE = "lost_node"
    INTERRUPTED = "interrupted"
    NOT_LAUNCHED = "not_launched"

    @property
    def is_oom(self) -> bool:
        return self in (Status.OOM_DEVICE, Status.OOM_HOST)

    @property
    def is_final(self) -> bool:
        return self is not Status.RUNNING

"""What a rank knows of its surroundings. ``cluster/`` provides it; nothing here knows of Ray."""

from __future__ import annotations

from typing import Protocol

from pydantic import Field

from zerotune.records.base import Record


class Progress(Record):
    """What a rank reports while it runs; rank 0's are shown.

    Attributes:
        phase: ``setup``, ``warmup``, ``measure``, ``profile``, ``train``, ``save``.
        step: Optimizer steps taken so far.
        steps: Steps wanted, if known.
        loss: Latest loss, if any.
        tokens_per_second: Over the latest steps, if measured.
        memory_bytes: Bytes in use on this rank, if measured.
        message: Anything worth a line.
    """

    phase: str
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int | None = None
    message: str | None = None
    extra: dict[str, float] = Field(default_factory=dict)


class RankContext(Protocol):
    """One rank of a run. ``torch.distributed`` is initialised before a run is given it, if ``world_size > 1``."""

    rank: int
    world_size: int
    local_rank: int
    node: str
    device: str
    run_dir: str

    def report(self, progress: Progress) -> None:
        """Tell the driver where this rank stands; cheap, never blocks, and marks the rank as alive."""

"""What a benchmark of engines in turns found."""

from __future__ import annotations

from pydantic import Field

from zerotune.config.schema import JobConfig
from zerotune.records.base import Record
from zerotune.records.flow import Flow
from zerotune.records.ledger import Ledger
from zerotune.records.measurement import Interval, MemoryUse

PEERS = ("ddp", "fsdp2", "fsdp2:keep", "fsdp2:async", "deepspeed", "deepspeed:scaled")
"""Names of the engines of other libraries."""


class EngineFigures(Record):
    """One engine among those that were measured in turns.

    Attributes:
        name: ``zerotune``, ``zerotune:VARIANT``, a peer's, or ``compute``: the same step without communication, every
            rank at once, with its share of the optimizer.
        step_time_s: Median over rounds, on the slowest rank, with its interval.
        round_times_s: Seconds per step of each round.
        program_s: Seconds of processor time of a step in code of the rank's own, all threads, the mean over ranks. Where a
            rank has one core, what is missing of the step it stood still: for the link or for another rank.
        kernel_s: The same in the kernel: what sending and receiving cost.
        memory: Of every rank; empty for ``compute``.
        final_loss: Loss of the last step, the mean over ranks.
        sent_bytes: Bytes that one rank sends in a step, the one that sends most: counted for ``zerotune``, by the
            documentation for peers.
        limit_s: No step can take less: the larger of ``compute`` and the bytes at the measured rate of the link.
        flows: What the collectives of one step cost, by purpose; empty for peers, which keep no ledger.
    """

    name: str
    step_time_s: Interval
    round_times_s: list[float]
    program_s: float = 0.0
    kernel_s: float = 0.0
    memory: list[MemoryUse] = Field(default_factory=list)
    final_loss: float
    sent_bytes: float = 0.0
    limit_s: float | None = None
    flows: list[Flow] = Field(default_factory=list)

    @property
    def collectives(self) -> int:
        """Collectives of a step."""
        return sum(flow.count for flow in self.flows)

    @property
    def hidden_s(self) -> float:
        """Seconds of a step that collectives ran beside compute, one after the other."""
        return sum(flow.hidden_s for flow in self.flows)

    @property
    def exposed_s(self) -> float:
        """Seconds that a step stood still for collectives."""
        return sum(flow.exposed_s for flow in self.flows)

    @property
    def peak_live_elements(self) -> int | None:
        """Largest number of live elements over ranks."""
        return max((use.peak_live_elements for use in self.memory), default=None)

    @property
    def peak_memory_bytes(self) -> int | None:
        """Largest allocator's peak over ranks."""
        return max((use.peak for use in self.memory), default=None)


class BenchReport(Record):
    """Engines in turns within one run, the same on every rank.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        device: Device model, for the label.
        ranks: Number of ranks.
        parameters: Elements of the model.
        link_bytes_per_s: What one rank could send, measured by large gathers before and after.
        engines: In the order in which they were asked for.
        ratios: Step time of ``zerotune`` over that of an engine, ``zerotune/NAME``, and of an engine over its limit,
            ``NAME/limit``: the geometric mean of the rounds' ratios with its 95 % interval.
        rounds: How many times each was measured.
        steps_per_round: Steps of one measurement.
        configs: Of every engine of ours, as it ran: every ``auto`` a number.
        ledgers: Of a typical step of the first engine, one per rank; the store keeps them apart.
    """

    backend: str
    device: str
    ranks: int
    parameters: int
    link_bytes_per_s: float | None
    engines: list[EngineFigures]
    ratios: dict[str, Interval]
    rounds: int
    steps_per_round: int
    configs: dict[str, JobConfig] = Field(default_factory=dict)
    ledgers: list[Ledger] = Field(default_factory=list)

    def engine(self, name: str) -> EngineFigures:
        return next(figures for figures in self.engines if figures.name == name)

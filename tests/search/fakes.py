"""Workers that compute a measurement instead of taking it, over a surface that the test knows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.builders import MIB, make_ledger
from zerotune.cluster.faults import GroupFailed
from zerotune.cluster.messages import Limits
from zerotune.config.schema import JobConfig
from zerotune.records import Failure, Interval, Measurement, MemoryUse, Status
from zerotune.runs.workers import OnProgress
from zerotune.train.context import Progress
from zerotune.train.measure import median_interval, stop_reason, throughput
from zerotune.train.spec import RankReport, RunSpec

TOKENS = 1024.0


@dataclass(frozen=True)
class Point:
    """What a configuration costs: step time in seconds and peak in bytes."""

    step_s: float
    peak: int = 100 * MIB


Surface = Callable[[JobConfig], Point]


def fail(status: Status, message: str = "it went wrong", **fields: object) -> GroupFailed:
    """What a group raises for a run that did not end well."""
    return GroupFailed(
        Failure(status=status, message=message, rank=1, node="node0", phase="backward", **fields)
    )


@dataclass
class FakeWorkers:
    """Runs a specification on a surface; the surface may raise what a group raises.

    Attributes:
        surface: Cost of a configuration.
        noise: Relative standard deviation of step times.
        seed: Of the noise.
        specs: Everything that was run, in order.
    """

    surface: Surface
    noise: float = 0.0
    seed: int = 0
    ranks: int = 2
    specs: list[RunSpec] = field(default_factory=list)
    closed: bool = False

    def run(self, spec: RunSpec, limits: Limits, on_progress: OnProgress) -> list[RankReport]:
        self.specs.append(spec)
        on_progress(Progress(phase="warmup", step=1, steps=spec.warmup_steps))
        point = self.surface(spec.job)
        rng = random.Random(f"{self.seed}:{len(self.specs)}")
        times: list[float] = []
        why = None
        while why is None:
            times.append(point.step_s * max(0.1, rng.gauss(1.0, self.noise)))
            why = stop_reason(
                times,
                TOKENS,
                min_steps=spec.min_steps,
                max_steps=spec.max_steps,
                half_width=spec.half_width,
                give_up_below=spec.give_up_below,
            )
        step_time: Interval = median_interval(times)
        memory = [
            MemoryUse(peak=point.peak - rank, peak_allocated=point.peak - rank, at_rest=0, resident_peak=0)
            for rank in range(self.ranks)
        ]
        measurement = Measurement(
            step_time_s=step_time,
            tokens_per_second=throughput(step_time, TOKENS),
            step_times_s=times,
            tokens_per_step=TOKENS,
            warmup_steps=spec.warmup_steps,
            stopped_because=why,
            memory=memory,
            final_loss=2.0,
            startup_s=0.1,
        )
        return [
            RankReport(
                rank=rank,
                job=spec.job,
                measurement=measurement,
                ledger=make_ledger(rank) if spec.record_ledger else None,
                losses=[
                    3.0 - 0.1 * step for step in range(spec.job.train.steps if spec.mode == "train" else 2)
                ],
            )
            for rank in range(self.ranks)
        ]

    def close(self) -> None:
        self.closed = True

    @property
    def trials(self) -> list[JobConfig]:
        """Configurations of the trials, confirmations not among them."""
        return [spec.job for spec in self.specs if spec.profile_memory]

"""Engines in turns within one run: the same model, data, ranks and threads, so that only the engine differs.

Every round measures every engine once, every second round backwards: the ratio of two engines within a round is a
paired observation, whatever mood the machine is in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn

from zerotune.config.check import BatchPlan, batch_plan
from zerotune.config.errors import RunFailed, UsageError
from zerotune.config.schema import JobConfig
from zerotune.engine.group import RankGroup
from zerotune.engine.meeting import all_of
from zerotune.engine.protocol import StepResult
from zerotune.models.build import build_model
from zerotune.models.deferred import deferred
from zerotune.models.recompute import recompute_blocks
from zerotune.peers import PeerSetup, build_peer
from zerotune.records import Ledger
from zerotune.records.base import Record
from zerotune.records.bench import PEERS, BenchReport, EngineFigures
from zerotune.records.flow import flows_of
from zerotune.train import memory
from zerotune.train.context import RankContext
from zerotune.train.data import build_data
from zerotune.train.describe import describe
from zerotune.train.engines import make_engine, resolved_job, settling_steps
from zerotune.train.loop import Loop, synchronize
from zerotune.train.measure import median_interval, paired_ratio
from zerotune.train.optim import optimizer_factory
from zerotune.train.processor import ProcessorTime
from zerotune.train.progress import Reporter

OURS = "zerotune"
COMPUTE = "compute"
LOSS_TOLERANCE = 1e-4
"""Relative difference of the losses of two engines above which they do not train the same."""

_LEDGER_STEPS = 3
"""Steps whose ledgers are kept; what collectives cost is that of the one in the middle."""

_PROBE_BYTES = 4 * 2**20
_IN_FLIGHT = 4
_PROBES = 10


class BenchSpec(Record):
    """What to measure.

    Attributes:
        job: The workload; its knobs are those of ``zerotune``.
        engines: Names, ``zerotune`` first.
        variants: For names ``zerotune:VARIANT``: the same workload with other knobs.
        run_dir: Folder of this run.
        rounds: Times that each engine is measured.
        steps_per_round: Steps of one measurement.
        warmup_steps: Steps of each engine before the first.
    """

    job: JobConfig
    engines: tuple[str, ...]
    variants: dict[str, JobConfig] = Field(default_factory=dict)
    run_dir: str
    rounds: int = 10
    steps_per_round: int = 3
    warmup_steps: int = 3


class ComputeOnly:
    """The step without communication: forward, backward, and the optimizer on this rank's share of the elements."""

    def __init__(self, module: nn.Module, job: JobConfig, group: RankGroup) -> None:
        self.module = module
        numel = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self._share = nn.Parameter(torch.zeros(-(-numel // group.size), device=group.device))
        self._share.grad = torch.zeros_like(self._share)
        self.optimizer = optimizer_factory(job.train.optimizer)([{"params": [self._share]}])
        self._losses: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        loss.backward()
        self._losses.append(float(loss.detach()))

    def step(self) -> StepResult:
        self.optimizer.step()
        for param in self.module.parameters():
            param.grad = None
        loss = statistics.fmean(self._losses)
        self._losses.clear()
        return StepResult(loss, 1.0, float("nan"))

    def flush(self) -> None:
        """It holds nothing that could be dropped."""

    def close(self) -> None:
        self.optimizer.state.clear()


def run_bench(ctx: RankContext, spec: BenchSpec) -> BenchReport:
    """Measure engines in turns; every rank returns the same report.

    Raises:
        UsageError: An engine is unknown, not installed, or cannot train this job.
        RunFailed: Two engines do not train the same: their losses differ.
    """
    try:
        return _Bench(ctx, spec).run()
    finally:
        memory.release_memory()


class _Bench:
    def __init__(self, ctx: RankContext, spec: BenchSpec) -> None:
        self.spec = spec
        self.reporter = Reporter(ctx)
        self.reporter.phase("setup")
        device = torch.device(ctx.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.group = RankGroup.default(device)
        train = spec.job.train
        self.data = build_data(spec.job.data, spec.job.model, train.seed, train.global_batch_size)
        self.loops: dict[str, Loop] = {}
        self.processor: dict[str, ProcessorTime] = {}
        self.parameters = describe(spec.job).parameters

    def run(self) -> BenchReport:
        names = [*self.spec.engines, COMPUTE]
        rates = [self._link_rate()]
        # The same number for all, so that their losses can be compared.
        jobs = [self.spec.job, *self.spec.variants.values()]
        warmup_steps = max(self.spec.warmup_steps, *map(settling_steps, jobs))
        try:
            for name in names:
                self.loops[name] = self._build(name)
                for _ in range(warmup_steps):
                    self.loops[name].take_step()
            self._check_losses()
            times = self._rounds(names)
            rates.append(self._link_rate())
            return self._report(times, max((rate for rate in rates if rate), default=None))
        finally:
            for loop in self.loops.values():
                loop.engine.close()

    def _build(self, name: str) -> Loop:
        job = self.spec.variants.get(name, self.spec.job)
        with self.group.device:
            if name.startswith(OURS):
                with deferred():
                    module = build_model(job.model, job.train.seed)
                engine: Any = make_engine(job, module, self.group)
            else:
                module = build_model(job.model, job.train.seed)
                recompute_blocks(
                    module, job.train.activation_checkpointing, leaf_modules=job.train.leaf_modules
                )
                engine = self._peer(name, module, job)
        return Loop(job, engine, self.data, self.group, self._plan(job))

    def _plan(self, job: JobConfig) -> BatchPlan:
        return batch_plan(job.train.global_batch_size, self.group.size, job.train.micro_batch_size)

    def _peer(self, name: str, module: nn.Module, job: JobConfig) -> Any:
        if name == COMPUTE:
            return ComputeOnly(module, job, self.group)
        if name not in PEERS:
            raise UsageError(f"there is no engine {name}", f"take some of zerotune, {', '.join(PEERS)}")
        if job.train.precision != "fp32":
            raise UsageError(
                f"{name} is compared in fp32 only, not in {job.train.precision}",
                "each library casts in other places: the losses would differ",
            )
        plan = self._plan(job)
        setup = PeerSetup(
            optimizer_factory(job.train.optimizer),
            plan.accumulation,
            plan.micro_batch_size,
            job.train.clip_norm,
        )
        return build_peer(name, module, setup, self.group)

    def _check_losses(self) -> None:
        """Engines that learn something else are not to be compared."""
        traces = {name: self._mean_losses(loop) for name, loop in self.loops.items() if name != COMPUTE}
        reference = traces[self.spec.engines[0]]
        for name, losses in traces.items():
            for step, (mine, theirs) in enumerate(zip(reference, losses, strict=True)):
                if abs(mine - theirs) > LOSS_TOLERANCE * abs(mine):
                    raise RunFailed(
                        f"{name} does not train the same as {self.spec.engines[0]}: its loss in step {step} is "
                        f"{theirs:.6f}, not {mine:.6f}"
                    )

    def _mean_losses(self, loop: Loop) -> list[float]:
        rows = self.group.gather_numbers(loop.losses)
        return [statistics.fmean(row[step] for row in rows) for step in range(len(loop.losses))]

    def _rounds(self, names: list[str]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(self.spec.rounds):
            self.reporter.phase("measure", number, self.spec.rounds)
            mine = {}
            for name in names if number % 2 == 0 else reversed(names):
                self.group.gather_numbers([0.0])  # together
                loop = self.loops[name]
                # One step untimed: the caches are the other engine's, and what a step begins for the next is not there.
                loop.take_step()
                before = ProcessorTime.so_far()
                mine[name] = statistics.fmean(loop.timed_step() for _ in range(self.spec.steps_per_round))
                spent = ProcessorTime.so_far() - before
                self.processor[name] = self.processor.get(name, ProcessorTime()) + spent
                loop.engine.flush()  # nor may it run into the next engine's
            rows = self.group.gather_numbers([mine[name] for name in names])
            for index, name in enumerate(names):
                times[name].append(max(row[index] for row in rows))
        return times

    def _report(self, times: dict[str, list[float]], rate: float | None) -> BenchReport:
        self.reporter.phase("profile")
        final = {name: self._mean_losses(loop)[-1] for name, loop in self.loops.items()}
        compute = times[COMPUTE]
        figures, ratios, configs = [], {}, {}
        ledgers: list[Ledger] = []
        steps = self.spec.rounds * self.spec.steps_per_round
        for name, loop in self.loops.items():
            flows, sent = [], 0.0
            if name.startswith(OURS):
                typical = self._typical_step(loop)
                flows, sent = flows_of(typical), _most_sent(typical)
                ledgers = ledgers or typical
                configs[name] = self._resolved(name)
            else:
                sent = self._documented_bytes(name)
            limits = [max(own, sent / rate if rate else 0.0) for own in compute]
            processor = self.processor[name].per_step(steps, self.group)
            uses = []
            if name != COMPUTE:
                engine: Any = loop.engine
                uses = memory.of_all_ranks(
                    memory.memory_use(
                        engine, self.group.device, partial(memory.steady_peak, loop.whole_step)
                    ),
                    self.group,
                )
                ratios[f"{name}/limit"] = paired_ratio(times[name], limits)
            figures.append(
                EngineFigures(
                    name=name,
                    step_time_s=median_interval(times[name]),
                    round_times_s=times[name],
                    program_s=processor.program,
                    kernel_s=processor.kernel,
                    memory=uses,
                    final_loss=final[name],
                    sent_bytes=sent,
                    limit_s=statistics.median(limits),
                    flows=flows,
                )
            )
        first = self.spec.engines[0]
        for name in times:
            if name != first:
                ratios[f"{first}/{name}"] = paired_ratio(times[first], times[name])
        return BenchReport(
            backend=self.group.backend,
            device=_device_model(self.group.device),
            ranks=self.group.size,
            parameters=self.parameters,
            link_bytes_per_s=rate,
            engines=figures,
            ratios=ratios,
            rounds=self.spec.rounds,
            steps_per_round=self.spec.steps_per_round,
            configs=configs,
            ledgers=ledgers,
        )

    def _resolved(self, name: str) -> JobConfig:
        job = self.spec.variants.get(name, self.spec.job)
        engine: Any = self.loops[name].engine
        return resolved_job(job, engine, self._plan(job))

    def _typical_step(self, loop: Loop) -> list[Ledger]:
        """Every rank's ledger of the step, of a few, whose collectives cost neither most nor least."""
        engine: Any = loop.engine
        mine: list[Ledger] = []
        for _ in range(_LEDGER_STEPS):
            engine.begin_ledger()
            loop.take_step()
            mine.append(engine.end_ledger())
        everyone = all_of(self.group, mine)
        steps = [list(ledgers) for ledgers in zip(*everyone, strict=True)]
        by_cost = sorted(steps, key=lambda ledgers: sum(flow.exposed_s for flow in flows_of(ledgers)))
        return by_cost[_LEDGER_STEPS // 2]

    def _documented_bytes(self, name: str) -> float:
        """What a rank of a peer sends in a step."""
        if name == COMPUTE:
            return 0.0
        size = self.group.size
        peer: Any = self.loops[name].engine
        return 4.0 * peer.elements_per_step * self.parameters * (size - 1) / size

    def _link_rate(self) -> float | None:
        """Bytes per second that every rank can send while it receives as many: the best of a few runs of large gathers,
        several of them in flight, as in a step."""
        if self.group.size == 1:
            return None
        mine = torch.zeros(_PROBE_BYTES // 4, device=self.group.device)
        everyone = [
            torch.empty(mine.numel() * self.group.size, device=mine.device) for _ in range(_IN_FLIGHT)
        ]
        seconds = []
        for _ in range(_PROBES):
            self.group.gather_numbers([0.0])
            synchronize(self.group.device)
            started = time.perf_counter()
            works = [
                dist.all_gather_single(output, mine, group=self.group.process_group, async_op=True)
                for output in everyone
            ]
            for work in works:
                assert work is not None
                work.wait()
            synchronize(self.group.device)
            seconds.append(time.perf_counter() - started)
        rows = self.group.gather_numbers(seconds)
        best = min(max(row[i] for row in rows) for i in range(_PROBES))
        return _IN_FLIGHT * mine.nbytes * (self.group.size - 1) / best


def _most_sent(ledgers: Sequence[Ledger]) -> float:
    return float(max(sum(entry.sent_bytes for entry in ledger.collectives) for ledger in ledgers))


def _device_model(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} per rank"

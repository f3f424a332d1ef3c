"""One run on one rank, from a configuration to a report. It is what a worker group is given to call."""

from __future__ import annotations

import time

import torch

from zerotune.config.check import batch_plan
from zerotune.engine.group import RankGroup
from zerotune.models.build import build_model
from zerotune.models.deferred import deferred
from zerotune.records import Ledger, Measurement, MemoryHistory, MemoryUse
from zerotune.train import memory, saving
from zerotune.train.context import RankContext
from zerotune.train.data import build_data
from zerotune.train.engines import TunedEngine, make_engine, resolved_job, settling_steps
from zerotune.train.loop import Loop
from zerotune.train.memory_history import profiled_step
from zerotune.train.progress import Reporter
from zerotune.train.spec import RankReport, RunSpec
from zerotune.train.steady import Steady, Stopwatch, measure_steps, measurement


def run(ctx: RankContext, spec: RunSpec) -> RankReport:
    """Measure or train, as ``spec.mode`` says, and leave the process as it was.

    Raises:
        UsageError: The configuration or the user's code cannot be run.
        RunFailed: The loss is no longer finite, or the user's forward pass raised.
    """
    try:
        return _run(ctx, spec)
    finally:
        memory.release_memory()


def _run(ctx: RankContext, spec: RunSpec) -> RankReport:
    started = time.perf_counter()
    reporter = Reporter(ctx)
    reporter.phase("setup")
    job = spec.job
    spec = spec.model_copy(update={"warmup_steps": max(spec.warmup_steps, settling_steps(job))})
    device = torch.device(ctx.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = RankGroup.default(device)
    assert (group.rank, group.size) == (ctx.rank, ctx.world_size), (
        "torch.distributed is set up as the context says"
    )

    plan = batch_plan(job.train.global_batch_size, group.size, job.train.micro_batch_size)
    data = build_data(job.data, job.model, job.train.seed, job.train.global_batch_size)
    with device, deferred():
        model = build_model(job.model, job.train.seed)
    weights = job.train.weights if spec.resume_from is None else None  # a checkpoint holds them all
    engine = make_engine(job, model, group, weights)
    try:
        loop = Loop(resolved_job(job, engine, plan), engine, data, group, plan)
        if spec.resume_from is not None:
            loop.step = saving.resume(engine, spec.resume_from, job)
        memory.reset_peaks(device)
        startup_s = time.perf_counter() - started
        if spec.mode == "measure":
            return _measure(loop, engine, spec, reporter, startup_s)
        return _train(loop, engine, spec, reporter, startup_s)
    finally:
        saving.abandon(engine)
        engine.close()


def _measure(
    loop: Loop, engine: TunedEngine, spec: RunSpec, reporter: Reporter, startup_s: float
) -> RankReport:
    """Warm up, take steady steps until they say enough, then one step for the ledger and one for the memory."""
    first_step = loop.step
    reporter.phase("warmup", steps=spec.warmup_steps)
    for done in range(1, spec.warmup_steps + 1):
        seconds = loop.timed_step()
        reporter.step("warmup", loop, spec.warmup_steps, seconds, done)

    reporter.phase("measure", steps=spec.max_steps)
    steady = measure_steps(loop, spec, reporter)

    loop.check_loss()
    reporter.phase("profile")
    ledger = _step_with_ledger(loop, engine) if spec.record_ledger else None
    ranks_memory, history = _memory(loop, engine, spec)
    return RankReport(
        rank=loop.group.rank,
        job=loop.job,
        measurement=_measurement(loop, steady, ranks_memory, ledger, spec, startup_s),
        ledger=_with_history(ledger, history),
        losses=loop.losses,
        skipped=loop.skipped,
        first_step=first_step,
    )


def _train(
    loop: Loop, engine: TunedEngine, spec: RunSpec, reporter: Reporter, startup_s: float
) -> RankReport:
    """Take all steps of the training. Two early ones also give the ledger and the memory; they are not timed."""
    job, first_step = loop.job, loop.step
    last_step = job.train.steps - 1
    # The first steps after the warm-up, or the last there are.
    memory_step = min(first_step + spec.warmup_steps + 1, last_step)
    ledger_step = max(min(memory_step - 1, last_step), first_step)
    stopwatch = Stopwatch()
    ledger: Ledger | None = None
    ranks_memory: list[MemoryUse] | None = None
    history: MemoryHistory | None = None
    checkpoint: str | None = None

    reporter.phase("train", loop.step, job.train.steps)
    while loop.step < job.train.steps:
        step, began = loop.step, time.perf_counter()
        if step == memory_step:
            ranks_memory, history = _memory(loop, engine, spec)
            if loop.step == step:  # nothing was profiled
                loop.take_step()
        elif step == ledger_step and spec.record_ledger:
            ledger = _step_with_ledger(loop, engine)
        else:
            seconds = loop.timed_step()
            if step > memory_step:
                stopwatch.add(seconds, loop.tokens)
        reporter.step("train", loop, job.train.steps, time.perf_counter() - began)
        if saving.is_due(job, loop.step):
            reporter.phase("save", loop.step, job.train.steps)
            if job.train.save_async:
                saving.begin_save(engine, spec.run_dir, loop.step)
            else:
                checkpoint = saving.save(engine, spec.run_dir, loop.step)
    if job.train.save_async:
        checkpoint = saving.finish(engine)
    loop.check_loss()

    steady = stopwatch.steady(loop.group, spec.half_width)
    return RankReport(
        rank=loop.group.rank,
        job=job,
        measurement=_measurement(loop, steady, ranks_memory, ledger, spec, startup_s),
        ledger=_with_history(ledger, history),
        losses=loop.losses,
        skipped=loop.skipped,
        first_step=first_step,
        checkpoint=checkpoint,
    )


def _step_with_ledger(loop: Loop, engine: TunedEngine) -> Ledger:
    engine.begin_ledger()
    loop.take_step()
    return engine.end_ledger()


def _memory(loop: Loop, engine: TunedEngine, spec: RunSpec) -> tuple[list[MemoryUse], MemoryHistory | None]:
    """Memory of every rank, and this rank's history; it takes a step to find out, if ``spec.profile_memory`` says so."""
    device = loop.group.device
    history: MemoryHistory | None = None

    def step_peak() -> int:
        nonlocal history
        if not spec.record_ledger:
            return memory.allocation_peak(loop.whole_step)
        rest = sum(engine.at_rest().values())
        history = profiled_step(engine, device, loop.whole_step)
        return history.peak_bytes - rest

    use = memory.memory_use(engine, device, step_peak if spec.profile_memory else None)
    if device.type == "cuda" and spec.profile_memory and spec.record_ledger:
        step_peak()  # the allocator knows its peak by itself, but not whose it is
    return memory.of_all_ranks(use, loop.group), history


def _with_history(ledger: Ledger | None, history: MemoryHistory | None) -> Ledger | None:
    return ledger.model_copy(update={"memory": history}) if ledger is not None else None


def _measurement(
    loop: Loop,
    steady: Steady | None,
    ranks_memory: list[MemoryUse] | None,
    ledger: Ledger | None,
    spec: RunSpec,
    startup_s: float,
) -> Measurement | None:
    """``None`` for a training too short to have a steady step."""
    if steady is None or ranks_memory is None:
        return None
    return measurement(
        steady,
        ranks_memory,
        ledger,
        warmup_steps=spec.warmup_steps,
        startup_s=startup_s,
        final_loss=loop.losses[-1],
        group=loop.group,
    )

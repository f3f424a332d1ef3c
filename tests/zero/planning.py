"""What ranks do in the tests of ``release: planned``."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.zero.jobs import make_model, make_optimizer, mean_loss, micro_batches
from zerotune.config.knobs import Knobs
from zerotune.engine.allocations import CpuAllocations
from zerotune.predict import replay
from zerotune.records import ByteClass, Link, Profile
from zerotune.schedule import ReleasePlan

GENEROUS = 2**40


@dataclass
class Trained:
    """What came of a training, rank by rank."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    plan: ReleasePlan
    lines: list[str]
    is_settled: bool
    live: list[int] = field(default_factory=list)
    peak_live: int = 0
    peak: int = 0
    live_after_flush: int = 0


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(
    rank: int,
    size: int,
    knobs: dict[str, Any],
    steps: int = 16,
    model: str = "gpt",
    accumulation: int = 1,
    irregular: tuple[int, ...] = (),
    **settings: Any,
) -> Trained:
    """Train, and look at the allocator in the last two steps (the least counts); in irregular steps the model is evaluated as well."""
    import zerotune

    module: nn.Module = make_model(model)
    lines = _Lines()
    logger = logging.getLogger("zerotune.zero.planning")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        every = {"param_persistence_threshold": 0} | knobs
        engine = zerotune.ZeroEngine(
            module, make_optimizer("adamw", module.parameters()), Knobs(**every), **settings
        )
        losses, live = [], []
        peaks = []
        for step in range(steps):
            recorder = None
            if step >= steps - 2:
                engine.flush()
                recorder = CpuAllocations(sum(engine.at_rest().values()))
                recorder.start()
            engine.ledger.reset_peaks()
            for x, y in micro_batches(rank, size, accumulation, step):
                if step in irregular:
                    with torch.no_grad():
                        engine(x)
                engine.backward(mean_loss(engine(x), y))
            losses.append(engine.step().loss)
            live.append(engine.peak_live_elements)
            if recorder is not None:
                peaks.append(max(recorder.stop()))
        planner = engine._planner
        trained = Trained(
            losses,
            engine.full_state_dict(),
            engine._executor.plan,
            lines.lines,
            planner is None or planner.is_settled,
            live,
            peak_live=max(schedule.peak_live for schedule in engine.schedules),
            peak=min(peaks),
        )
        engine.flush()
        trained.live_after_flush = engine.ledger.live_elements
        engine.close()
        return trained
    finally:
        logger.removeHandler(lines)


def train_by_hand(rank: int, size: int, plans: dict[int, ReleasePlan], precision: Any = "fp32") -> Trained:
    """Train, and go on with other plans after some of the steps."""
    import zerotune

    module = make_model("gpt")
    optimizer = make_optimizer("adamw", module.parameters())
    knobs = Knobs(param_persistence_threshold=0, prefetch_distance=6000)
    engine = zerotune.ZeroEngine(module, optimizer, knobs, precision=precision)
    losses, live = [], []
    for step in range(8):
        engine.ledger.reset_peaks()
        for x, y in micro_batches(rank, size, 1, step):
            engine.backward(mean_loss(engine(x), y))
        losses.append(engine.step().loss)
        expected = max((schedule.peak_live for schedule in engine.schedules), default=0)
        live.append(engine.peak_live_elements - expected)
        if step in plans:
            engine._use_plan(plans[step])
    engine.flush()
    full = engine.ledger.bytes(ByteClass.FULL)
    trained = Trained(losses, engine.full_state_dict(), engine._executor.plan, [], True, live, peak=full)
    engine.close()
    return trained


def full_at_peak(rank: int, size: int, knobs: dict[str, Any], plan: ReleasePlan) -> tuple[int, int]:
    """Bytes of full parameters and gather buffers at their peak in a step: counted, and replayed from its schedule."""
    import zerotune

    module = make_model("gpt")
    every = Knobs(**{"param_persistence_threshold": 0} | knobs)
    engine = zerotune.ZeroEngine(module, make_optimizer("adamw", module.parameters()), every)
    engine._use_plan(plan)
    counted = 0
    for step in range(4):
        engine.flush()
        engine.ledger.begin()
        for x, y in micro_batches(rank, size, 1, step):
            engine.backward(mean_loss(engine(x), y))
        engine.step()
        counted = engine.ledger.end().peak[ByteClass.FULL]
    (schedule,) = engine.schedules
    profile = Profile(step_s=0.0, link=Link(), passes=(), gathered_rows=size - 1)
    found = replay(schedule, engine.layout, [0.0] * len(schedule.actions), profile)
    engine.close()
    return counted, 4 * max(load.acting_held for load in found.loads)

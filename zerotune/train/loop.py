"""One optimizer step, and the clock around it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from zerotune.config.check import BatchPlan
from zerotune.config.errors import RunFailed
from zerotune.config.schema import JobConfig
from zerotune.engine.group import RankGroup
from zerotune.engine.protocol import Engine
from zerotune.models.marks import FORWARD, mark
from zerotune.models.task import Task
from zerotune.train.data import Data
from zerotune.train.lr import lr_multiplier, set_lr
from zerotune.train.seeds import seed_step


def micro_batch_indices(plan: BatchPlan, ranks: int, rank: int, micro: int) -> range:
    """Which samples of the global batch a rank takes in its micro-batch number ``micro``.

    Over all ranks and micro-batches each sample occurs exactly once.
    """
    start = (micro * ranks + rank) * plan.micro_batch_size
    return range(start, start + plan.micro_batch_size)


@dataclass
class Loop:
    """Trains an engine on data, one step after the other.

    Attributes:
        job: The configuration.
        engine: What is trained.
        data: What it is trained on.
        group: The ranks.
        plan: How the global batch is spread over them.
        step: Number of the next step.
        losses: Loss of every step taken here.
        tokens: Real tokens of the latest step on this rank.
        skipped: Numbers of the steps that changed nothing, because a gradient was not finite.
    """

    job: JobConfig
    engine: Engine
    data: Data
    group: RankGroup
    plan: BatchPlan
    step: int = 0
    losses: list[float] = field(default_factory=list)
    tokens: float = 0.0
    skipped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.task = Task(self.job.model)

    def take_step(self) -> None:
        """Take one optimizer step over the global batch.

        Raises:
            RunFailed: The loss is no longer finite, though the step was taken; or too many steps in a row were skipped.
        """
        train, group = self.job.train, self.group
        seed_step(train.seed, group.rank, self.step)
        set_lr(self.engine.optimizer, lr_multiplier(train.lr_schedule, self.step, train.steps))
        self.tokens = 0.0
        for micro in range(self.plan.accumulation):
            indices = micro_batch_indices(self.plan, group.size, group.rank, micro)
            with mark(FORWARD):
                batch = self.data.batch(self.step, indices).to(group.device)
                loss, weight = self.task.loss(self.engine, batch)
            self.engine.backward(loss, weight)
            # Data of the user's own has no tokens; its items stand in for them.
            self.tokens += weight if batch.tokens is None else batch.tokens
        result = self.engine.step()
        self.losses.append(result.loss)
        self.step += 1
        if result.skipped:
            self.skipped.append(self.step - 1)
        else:
            self.check_loss()

    def whole_step(self) -> None:
        """Take one optimizer step, and end what it begins for the next one."""
        self.take_step()
        self.engine.flush()

    def check_loss(self) -> None:
        """Whether the latest loss is a number; that of a skipped step need not be, but that of the last step.

        Raises:
            RunFailed: It is not.
        """
        loss = self.losses[-1]
        if not math.isfinite(loss):
            raise RunFailed(
                f"the loss of step {self.step - 1} is {loss}",
                "lower train.optimizer.lr or set train.clip_norm",
            )

    def timed_step(self) -> float:
        """Take one optimizer step and return its seconds on this rank, from an idle device to an idle device."""
        synchronize(self.group.device)
        started = time.perf_counter()
        self.take_step()
        synchronize(self.group.device)
        return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

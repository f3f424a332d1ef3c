"""From a configuration to an engine around a model."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from zerotune.checkpoints import Checkpointable
from zerotune.config.check import BatchPlan
from zerotune.config.knobs import Knobs
from zerotune.config.schema import JobConfig
from zerotune.engine.group import RankGroup
from zerotune.engine.protocol import Engine
from zerotune.models.recompute import recompute_blocks
from zerotune.train.optim import optimizer_factory


class TunedEngine(Engine, Checkpointable, Protocol):
    """What the loop needs of an engine: it trains, it can be saved, and it says how it was tuned."""

    @property
    def knobs(self) -> Knobs:
        """As they act, every ``auto`` a number."""

    @property
    def peak_live_elements(self) -> int:
        """Largest number of live elements so far."""


def settling_steps(job: JobConfig) -> int:
    """Optimizer steps after which an engine is as it will stay: before, it measures itself."""
    from zerotune.zero.planning import SETTLING_STEPS, plans_release

    return SETTLING_STEPS if plans_release(job.zero) else 0


def make_engine(
    job: JobConfig, model: nn.Module, group: RankGroup, weights: str | None = None
) -> TunedEngine:
    """Build the engine that ``train.engine`` names.

    Args:
        job: The configuration.
        model: Ordinary, or built within :func:`zerotune.models.deferred.deferred`.
        group: The ranks.
        weights: Safetensors files to start from.

    Raises:
        UsageError: The model cannot be trained, or the weights do not fit it.
    """
    from zerotune.zero.engine import ZeroEngine
    from zerotune.zero.scaler import LossScaling

    assert job.train.engine == "zerotune", "the schema knows no other engine"
    recompute_blocks(model, job.train.activation_checkpointing, leaf_modules=job.train.leaf_modules)
    return ZeroEngine(
        model,
        optimizer=optimizer_factory(job.train.optimizer),
        knobs=job.zero,
        group=group,
        precision=job.train.precision,
        clip_norm=job.train.clip_norm,
        clip_norm_type=job.train.clip_norm_type,
        gradient_dtype=job.train.gradient_dtype,
        reduce_dtype=job.train.reduce_dtype,
        loss_scaling=LossScaling(**job.train.loss_scale.model_dump()),
        max_skipped_steps=job.train.max_skipped_steps,
        accumulate=job.train.accumulate,
        leaf_modules=job.train.leaf_modules,
        weights=weights,
    )


def resolved_job(job: JobConfig, engine: TunedEngine, plan: BatchPlan) -> JobConfig:
    """The configuration as it runs: every ``auto`` a number."""
    train = job.train.model_copy(update={"micro_batch_size": plan.micro_batch_size})
    return job.model_copy(update={"zero": engine.knobs, "train": train})

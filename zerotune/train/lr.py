"""The learning rate over steps."""

from __future__ import annotations

import math

import torch

from zerotune.config.schema import LrScheduleConfig


def lr_multiplier(config: LrScheduleConfig, step: int, steps: int) -> float:
    """What the learning rate is multiplied by in a step.

    Linear warm-up ends at 1 with step ``warmup_steps - 1``; a decay reaches ``min_ratio`` at step ``decay_steps``,
    counted from the first step, and stays there.

    Args:
        config: The schedule.
        step: Number of the step, from 0.
        steps: Steps of the whole training, which is where a decay ends if ``decay_steps`` is not given.

    Returns:
        A factor from 0 to 1.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    length = (config.decay_steps or steps) - config.warmup_steps
    done = min((step - config.warmup_steps) / length, 1.0) if length > 0 else 1.0
    share = 1 - done if config.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_ratio + (1 - config.min_ratio) * share


def set_lr(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    """Set every group's rate to ``multiplier`` times the rate it was built with (kept as ``initial_lr``)."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * multiplier

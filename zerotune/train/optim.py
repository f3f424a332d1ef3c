"""From the ``train.optimizer`` section to a torch optimizer over whatever parameter groups an engine shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerotune.config.knobs import OptimizerName
from zerotune.config.schema import OptimizerConfig

ParamGroups = list[dict[str, Any]]

_FUSED_DEVICES = {"cpu", "cuda"}


def optimizer_factory(config: OptimizerConfig) -> Callable[[ParamGroups], torch.optim.Optimizer]:
    """A function from parameter groups to the configured optimizer.

    It is torch's fused implementation, one pass over the memory, where that exists: floating-point parameters on CPU
    or CUDA. A group may bring its own ``lr`` or ``weight_decay``.
    """

    def build(groups: ParamGroups) -> torch.optim.Optimizer:
        fused = can_fuse([parameter for group in groups for parameter in group["params"]])
        if config.name is OptimizerName.ADAMW:
            return torch.optim.AdamW(
                groups,
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=fused,
            )
        return torch.optim.SGD(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=fused,
        )

    return build


def can_fuse(parameters: list[Tensor]) -> bool:
    """Whether torch has a fused optimizer for these parameters."""
    return bool(parameters) and all(
        p.is_floating_point() and p.device.type in _FUSED_DEVICES for p in parameters
    )

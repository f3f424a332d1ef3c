"""The sharded optimizer: an ordinary torch optimizer over this rank's slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zerotune.config.errors import UsageError
from zerotune.schedule import ParamRef
from zerotune.zero.elementwise import refuse_by_name, refuse_unless_elementwise
from zerotune.zero.shards import ShardedParam

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Builds an optimizer from parameter groups, as torch's own classes do."""


def shard_optimizer(
    optimizer: torch.optim.Optimizer | OptimizerFactory | None,
    params: Iterable[ShardedParam],
    shard: Callable[[ShardedParam, torch.Tensor], torch.Tensor],
) -> torch.optim.Optimizer:
    """Make an optimizer work on slices.

    Args:
        optimizer: An elementwise torch optimizer built on the model's parameters, before its first step (its groups
            and their settings are kept); or a callable that builds one from parameter groups; or ``None`` for AdamW
            with torch's defaults.
        params: The trainable parameters.
        shard: The part, laid out like the parameter's master, of a tensor of the full parameter's shape.

    Returns:
        The optimizer over the slices (the same object where one was given).

    Raises:
        UsageError: It is not elementwise, holds parameters that are not the model's, lacks some, or has stepped
            already.
    """
    trainable = list(params)
    if optimizer is None:
        optimizer = torch.optim.AdamW
    device = trainable[0].master.device
    if not isinstance(optimizer, torch.optim.Optimizer):
        refuse_by_name(optimizer)
        built = optimizer([{"params": [p.master for p in trainable]}])
        refuse_unless_elementwise(built, device)
        return built
    refuse_unless_elementwise(optimizer, device)
    if any(float(state.get("step", 1)) != 0 for state in optimizer.state.values()):
        raise UsageError(
            "the optimizer has stepped before the engine was built",
            "give the engine a new optimizer, then load its state",
        )
    by_identity: dict[nn.Parameter, ShardedParam] = {p.param: p for p in trainable}
    seen: set[nn.Parameter] = set()
    for number, group in enumerate(optimizer.param_groups):
        slices = []
        for param in group["params"]:
            sharded = by_identity.get(param)
            if sharded is None:
                if param.requires_grad:
                    raise UsageError(
                        f"parameter group {number} of the optimizer holds a parameter of shape {tuple(param.shape)} "
                        "that is not in the model",
                        "build the optimizer from this model's parameters",
                    )
                continue  # frozen parameters may be listed; they have no slice to update
            seen.add(param)
            slices.append(sharded.master)
            # What the constructor made (Adagrad's sums) is as long as the full parameter.
            initial = optimizer.state.pop(param, None)
            if initial:
                optimizer.state[sharded.master] = {
                    key: shard(sharded, value)
                    if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim()
                    else value
                    for key, value in initial.items()
                }
        group["params"] = slices
    missing = [p.name for p in trainable if p.param not in seen]
    if missing:
        raise UsageError(
            f"{missing[0]} and {len(missing) - 1} more trainable parameters are in no group of the optimizer"
            if len(missing) > 1
            else f"{missing[0]} is trainable but in no group of the optimizer",
            "add it to a group, or set requires_grad=False on it",
        )
    return optimizer


def frozen_homes(
    optimizer: torch.optim.Optimizer | OptimizerFactory | None, params: Iterable[ShardedParam]
) -> dict[ParamRef, int]:
    """Group of each frozen parameter that an optimizer lists, so that it finds its group when it is thawed."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {}
    by_identity = {p.param: p.ref for p in params if not p.param.requires_grad}
    return {
        by_identity[param]: number
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if param in by_identity
    }


def regroup(
    optimizer: torch.optim.Optimizer, params: Iterable[ShardedParam], homes: Mapping[ParamRef, int]
) -> dict[ParamRef, int]:
    """Make the groups hold the slices of exactly the parameters that train now.

    What was frozen keeps its state for the day it is thawed; what is thawed joins the group that it was listed in, else
    the last one.

    Args:
        optimizer: Over slices.
        params: All parameters.
        homes: Groups of frozen parameters, where known.

    Returns:
        Groups of the parameters that have left one now.
    """
    params = list(params)
    current = {
        master: number for number, group in enumerate(optimizer.param_groups) for master in group["params"]
    }
    left = {p.ref: current[p.master] for p in params if p.master in current and not p.param.requires_grad}
    last = len(optimizer.param_groups) - 1
    for group in optimizer.param_groups:
        group["params"] = []
    for param in params:
        if param.param.requires_grad:
            number = current.get(param.master, homes.get(param.ref, last))
            optimizer.param_groups[number]["params"].append(param.master)
    return left


def steps_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether several calls of ``step()``, each with the gradients of some parameters, do what one call with all does.

    torch's own optimizers keep all that they know per parameter; others may count their calls. Hooks of the user's are
    to see one call.
    """
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
    )


@contextmanager
def dividing_gradients(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[float]:
    """Let the optimizer multiply gradients by a factor as it reads them, if it can: one pass over them less.

    torch's fused optimizers divide by a scale for its ``GradScaler``; this is the same. Hooks of the user's are to see
    gradients that are scaled already.

    Args:
        optimizer: Which.
        factor: What gradients are multiplied by in all.

    Yields:
        What is left to multiply them by first.
    """
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    can = is_fused and getattr(optimizer, "_step_supports_amp_scaling", False) and steps_in_parts(optimizer)
    device = next((param.device for group in optimizer.param_groups for param in group["params"]), None)
    is_usable = factor != 1.0 and 0.0 < factor < math.inf and 1.0 / factor <= torch.finfo(torch.float32).max
    if not can or device is None or not is_usable:
        yield factor
        return
    scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
    optimizer.grad_scale = scale  # type: ignore[attr-defined]
    try:
        yield 1.0
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state tensors."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )

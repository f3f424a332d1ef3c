"""The sharded optimizer: an ordinary torch optimizer over this rank's slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zerotune.config.errors import UsageError
from zerotune.schedule import ParamRef
from zerotune.zero.shards import ShardedParam

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Builds an optimizer from parameter groups, as torch's own classes do."""


def shard_optimizer(
    optimizer: torch.optim.Optimizer | OptimizerFactory | None, params: Iterable[ShardedParam]
) -> torch.optim.Optimizer:
    """Make an optimizer work on slices.

    Args:
        optimizer: An elementwise torch optimizer built on the model's parameters, before its first step (its groups
            and their settings are kept); or a callable that builds one from parameter groups; or ``None`` for AdamW
            with torch's defaults.
        params: The trainable parameters.

    Returns:
        The optimizer over the slices (the same object where one was given).

    Raises:
        UsageError: It holds parameters that are not the model's, lacks some, or has stepped already.
    """
    trainable = list(params)
    if optimizer is None:
        optimizer = torch.optim.AdamW
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer([{"params": [p.master for p in trainable]}])
    if optimizer.state:
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


def squared_norm(params: Iterable[ShardedParam], ranks: int, rank: int, replicated: bool) -> torch.Tensor:
    """Sum of squares of this rank's slices of the gradients, in a fixed order.

    Padding is zero and adds nothing. At stage 0, where every rank holds all slices, only the rank's own count, so
    that the sum over ranks is the same to the bit at every stage.

    Returns:
        A float64 scalar tensor on the gradients' device.
    """
    slices = []
    for param in params:
        if param.grad is not None and param.has_grad:
            slices.append(param.grad.view(ranks, param.slice)[rank] if replicated else param.grad)
    if not slices:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(slices)).to(torch.float64)
    return (norms * norms).sum()


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state tensors."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )

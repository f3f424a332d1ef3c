"""Activation checkpointing: blocks keep only their inputs, and run again in backward.

The wrapping is inside the module's call, around its ``forward`` alone: a unit's hooks stay outside, so the recomputation
runs within the block's own use in backward and shares its gather.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerotune.config.errors import UsageError
from zerotune.models.units import LeafModules, repeated_blocks
from zerotune.models.uses import tensors_in


def recompute_blocks(
    module: nn.Module, mode: str, reentrant: bool = False, leaf_modules: LeafModules = "auto"
) -> list[nn.Module]:
    """Let a model's repeated blocks be recomputed in backward instead of keeping what is inside them.

    Random numbers of torch are drawn again as they were, so dropout is the same; what a block draws from ``random`` or
    numpy, and what it counts or updates in place, happens twice.

    Args:
        module: The model, before an engine takes it over.
        mode: ``none``, ``full``, or ``every_K``: the first of every K blocks.
        reentrant: Recompute by a backward pass inside the backward pass, as older code does, not by hooks on saved
            tensors. A call none of whose inputs needs a gradient is recomputed by hooks all the same: the gradients of
            its parameters would be lost.
        leaf_modules: As the engine's.

    Returns:
        The blocks that will be recomputed.

    Raises:
        UsageError: The model has no blocks that repeat.
    """
    stride = {"none": 0, "full": 1}.get(mode) if not mode.startswith("every_") else int(mode[len("every_") :])
    if stride is None:
        raise ValueError(f"mode {mode!r} is none of none, full and every_K")
    if stride == 0:
        return []
    blocks = repeated_blocks(module, leaf_modules)
    if not blocks:
        raise UsageError(
            f"activation_checkpointing {mode}: the model has no blocks that repeat in a ModuleList or Sequential",
            "set train.activation_checkpointing to none, or call torch.utils.checkpoint in the model",
        )
    chosen = blocks[::stride]
    for block in chosen:
        # A partial of a bound method, so that a copy of the module calls its own forward.
        block.forward = partial(_recomputed, block.forward, reentrant)
    return chosen


def _recomputed(forward: Callable[..., Any], reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    """Call a block's forward so that it is run again in backward."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not reentrant or not any(t.requires_grad for t in tensors_in((args, kwargs))):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    # The reentrant kind takes positional arguments alone, and sees tensors only where they are arguments themselves.
    names, count = tuple(kwargs), len(args)

    def positional(*values: Any) -> Any:
        return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return checkpoint(positional, *args, *kwargs.values(), use_reentrant=True)

"""Which optimizers can work on slices: those that treat every element on its own.

An optimizer whose state or update mixes the elements of a parameter (a norm of the whole layer, a factored second moment,
an orthogonalised matrix, a history of all parameters) would train something else on slices than on whole parameters. It is
found out by trying: two steps on a small matrix must give what they give on the matrix's two halves.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, NoReturn

import torch
from torch import nn

from zerotune.config.errors import UsageError

_SLICE = 16
_REASONS = {
    "LBFGS": "it keeps one history of all parameters together, and calls the model itself",
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it factors the second moment over rows and columns, and scales by the parameter's norm",
    "SparseAdam": "it takes sparse gradients only",
}


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Try an optimizer's update on a whole matrix and on slices of it; the optimizer itself is left alone.

    Args:
        optimizer: With any parameters.
        device: Where it will work.

    Raises:
        UsageError: It names the optimizer and the reason.
    """
    refuse_by_name(type(optimizer))
    name = type(optimizer).__name__
    tried = set()
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        kind = repr({key: value for key, value in settings.items() if "lr" not in key})
        if kind in tried:
            continue
        tried.add(kind)
        try:
            whole = _updated(optimizer, settings, [(2, _SLICE)], device)
            halves = _updated(optimizer, settings, [(_SLICE,), (_SLICE,)], device)
        except Exception as error:
            _refuse(name, f"it cannot update one slice of a parameter: {error}")
        if not torch.allclose(whole, halves, rtol=1e-4, atol=1e-6, equal_nan=True):
            _refuse(name, "its update of a slice is not the slice of its update")


def refuse_by_name(kind: object) -> None:
    """Refuse what is known, where ``kind`` is a class of torch's that cannot work on slices.

    Raises:
        UsageError: It names the optimizer and the reason.
    """
    if isinstance(kind, type) and kind.__module__.startswith("torch.optim") and kind.__name__ in _REASONS:
        _refuse(kind.__name__, _REASONS[kind.__name__])


def _refuse(name: str, reason: str) -> NoReturn:
    raise UsageError(
        f"the optimizer {name} does not update every element on its own: {reason}",
        "use an elementwise one, such as AdamW or SGD",
    )


def _updated(
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    shapes: list[tuple[int, ...]],
    device: torch.device,
) -> torch.Tensor:
    """What two steps make of the same values in pieces of these shapes  # [2 * _SLICE]"""
    generator = torch.Generator().manual_seed(0)
    numel = 2 * _SLICE
    start, *gradients = (torch.randn(numel, generator=generator).to(device) for _ in range(3))
    pieces = start.split(numel // len(shapes))
    params = [nn.Parameter(piece.clone().view(shape)) for piece, shape in zip(pieces, shapes, strict=True)]
    probe = _bare_copy(optimizer, {**settings, "params": params})
    step = type(optimizer).step
    for gradient in gradients:
        for param, piece in zip(params, gradient.split(numel // len(shapes)), strict=True):
            param.grad = piece.clone().view(param.shape)
        step(probe)
    return torch.cat([param.detach().reshape(-1) for param in params]).float()


def _bare_copy(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """The same optimizer without hooks and state, on one other group; its rate is not 0, so that it moves."""
    probe: torch.optim.Optimizer = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    probe.__dict__.pop("step", None)  # a learning-rate scheduler may have wrapped it
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(probe, hooks, OrderedDict())
    if "lr" in group:
        rate = group["lr"]
        group["lr"] = torch.full_like(rate, 0.1) if isinstance(rate, torch.Tensor) else 0.1
    probe.param_groups = [copy.copy(group)]
    probe.state = defaultdict(dict)
    if isinstance(optimizer, torch.optim.Adagrad):
        for param in group["params"]:
            probe.state[param] = {
                "step": torch.zeros((), device=param.device if group["fused"] else None),
                "sum": torch.full_like(param, group["initial_accumulator_value"]),
            }
    return probe

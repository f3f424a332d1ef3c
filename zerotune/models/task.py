"""How a batch becomes a loss.

Language models (``gpt``, ``llama``, ``hf``) are called with tokens alone and give logits; the loss is the
cross-entropy in fp32, the mean over the targets that are not padding. Its weight is their number, so that the
step's loss is the mean over the real tokens of all ranks and micro-batches.

The user's own module (``model.factory``) follows this convention:

- *called with*: a batch that is a dict is passed as keywords, a tuple or list positionally, anything else alone.
  Built-in data (``text``, ``synthetic``) is passed as ``model(tokens)``; if ``forward`` has a parameter named
  ``targets``, as ``model(tokens, targets=targets)``, with the token that follows ``tokens[:, t]`` in
  ``targets[:, t]`` and -100 where there is none.
- *returns* one of

  =========================  =====================================================================================
  a scalar tensor            the mean loss over the batch's samples; its weight is the number of samples, or of
                             real tokens if the module was handed ``targets``
  ``(loss, weight)``         a scalar tensor and what it is the mean of: a number of items, any unit of yours
  anything with ``.loss``    an object or dict whose ``loss`` is such a scalar tensor
  logits ``(B, T, V)``       with built-in data only: the loss is computed as for the language models
  =========================  =====================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerotune.config.errors import UsageError
from zerotune.config.schema import ModelConfig
from zerotune.models.factory import users_forward
from zerotune.models.loss import cross_entropy_sum

IGNORE = -100
"""Target of a position that has no loss: padding."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch.

    Attributes:
        inputs: What the model is called with; tokens (B, T), int64, for language data.
        targets_BT: The token after each token, int64, :data:`IGNORE` where there is none; ``None`` for data that
            is not language.
        samples: Number of samples, B.
        tokens: Number of targets that are not padding; ``None`` for data that is not language.
    """

    inputs: Any
    targets_BT: Tensor | None
    samples: int
    tokens: int | None

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``."""
        return replace(self, inputs=_to(self.inputs, device), targets_BT=_to(self.targets_BT, device))


class LossOutput(NamedTuple):
    """Loss of a micro-batch: a scalar tensor, and the number of items it is the mean of."""

    loss: Tensor
    weight: float


def language_batch(tokens_BT: Tensor, targets_BT: Tensor) -> Batch:
    """A batch of tokens with their next tokens, both int64 (B, T) and on the CPU, where padding is counted."""
    return Batch(tokens_BT, targets_BT, len(tokens_BT), int((targets_BT != IGNORE).sum()))


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, tokens: int) -> Tensor:
    """Mean cross-entropy in fp32 over the targets that are not :data:`IGNORE`; zero, not NaN, if ``tokens`` is 0."""
    return cross_entropy_sum(logits_BTV.flatten(0, 1), targets_BT.flatten(), IGNORE) / max(tokens, 1)


class Task:
    """Calls a model, or the engine around it, with a batch, and makes a loss of what comes back.

    Args:
        model: The kind of model, which decides how it is called.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def loss(self, call: Callable[..., Any], batch: Batch) -> LossOutput:
        """Forward pass and loss of one micro-batch.

        Args:
            call: The module, or an engine with the attribute ``module``.
            batch: On the model's device.

        Raises:
            UsageError: The user's module returned something that is not a loss.
            RunFailed: It raised.
        """
        if self.model.hf is not None:
            logits_BTV = call(input_ids=batch.inputs).logits
        elif self.model.factory is None:
            logits_BTV = call(batch.inputs)
        else:
            return self._users_loss(call, batch)
        assert batch.targets_BT is not None and batch.tokens is not None, (
            "language models train on language data"
        )
        return LossOutput(cross_entropy(logits_BTV, batch.targets_BT, batch.tokens), batch.tokens)

    def _users_loss(self, call: Callable[..., Any], batch: Batch) -> LossOutput:
        assert self.model.factory is not None
        what = f"the model of factory {self.model.factory.factory}"
        handed_targets = batch.targets_BT is not None and _takes_targets(call)
        with users_forward(what):
            if handed_targets:
                output = call(batch.inputs, targets=batch.targets_BT)
            else:
                output = call_with(call, batch.inputs)
        loss, weight = _read_output(output)
        if loss is not None and loss.numel() == 1:
            if weight is None:
                weight = batch.tokens if handed_targets and batch.tokens is not None else batch.samples
            return LossOutput(loss.reshape(()), weight)
        logits = output[0] if isinstance(output, (tuple, list)) and output else output
        if (
            batch.targets_BT is not None
            and batch.tokens is not None
            and _are_logits(logits, batch.targets_BT)
        ):
            return LossOutput(cross_entropy(logits, batch.targets_BT, batch.tokens), batch.tokens)
        raise UsageError(
            f"{what} returned {_describe(output)}, which is not a loss",
            "return a scalar loss, (loss, weight), something with .loss, or, with built-in data, logits (B, T, V)",
        )


def call_with(call: Callable[..., Any], batch: Any) -> Any:
    """Pass a batch: a mapping as keywords, a tuple or list positionally, anything else alone."""
    if isinstance(batch, Mapping):
        return call(**batch)
    if isinstance(batch, (tuple, list)):
        return call(*batch)
    return call(batch)


def _read_output(output: Any) -> tuple[Tensor | None, float | None]:
    """The loss in a module's output and the weight that came with it, each ``None`` if there is none."""
    if isinstance(output, Tensor):
        return (output, None) if output.ndim <= 1 else (None, None)
    if isinstance(output, Mapping):
        return output.get("loss"), None
    if (
        isinstance(output, tuple)
        and len(output) == 2
        and isinstance(output[0], Tensor)
        and output[0].numel() == 1
    ):
        loss, weight = output
        if isinstance(weight, (int, float)) or (isinstance(weight, Tensor) and weight.numel() == 1):
            return loss, float(weight)
    loss = getattr(output, "loss", None)
    return (loss, None) if isinstance(loss, Tensor) else (None, None)


def _are_logits(output: Any, targets_BT: Tensor) -> bool:
    return isinstance(output, Tensor) and output.ndim == 3 and output.shape[:2] == targets_BT.shape


def _takes_targets(call: Callable[..., Any]) -> bool:
    module = call if isinstance(call, nn.Module) else getattr(call, "module", None)
    return isinstance(module, nn.Module) and "targets" in inspect.signature(module.forward).parameters


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, (tuple, list)):
        return f"a {type(output).__name__} of {', '.join(_describe(item) for item in output) or 'nothing'}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with {', '.join(map(str, output)) or 'nothing'}"
    return f"an object of type {type(output).__name__}"


def _to(value: Any, device: torch.device) -> Any:
    """Move every tensor in tuples, lists and mappings to ``device``."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        moved = [_to(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value

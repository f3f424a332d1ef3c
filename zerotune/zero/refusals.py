"""What cannot work is refused by name: models at set-up, and calls that would silently do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zerotune.config.errors import UsageError
from zerotune.models.access import is_wrapper, not_reading


def refuse_what_cannot_work(module: nn.Module, device: torch.device) -> None:
    """Refuse models that cannot be partitioned, or that would train something else when they are.

    Raises:
        UsageError: Names the parameter and the remedy.
    """
    with not_reading():
        _refuse(module, device)


def _refuse(module: nn.Module, device: torch.device) -> None:
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UsageError(f"{name} has no shape yet", "run one forward pass before the engine is built")
        if not param.is_floating_point():
            raise UsageError(f"{name} is of {param.dtype}; only floating-point parameters can be partitioned")
        if param.dtype is torch.float64:
            raise UsageError(
                f"{name} is of float64, and the engine's masters are fp32: it would train less exactly than it says",
                "cast the model with .float() first",
            )
        if param.device.type != device.type:
            raise UsageError(f"{name} is on {param.device}, the engine on {device}", "move the model first")
        if param.layout is not torch.strided:
            raise UsageError(f"{name} is sparse; only dense parameters can be partitioned")
        if is_wrapper(type(param)) or is_wrapper(type(param.data)):
            raise UsageError(
                f"{name} is a {type(param.data).__name__}; only plain parameters can be partitioned",
                "do not shard, quantise or wrap it before the engine is built",
            )
        if has_overlap(param):
            raise UsageError(
                f"several elements of {name} share one place in memory (it was expanded)",
                "register what it was expanded from, and expand it in forward",
            )
    for name, submodule in module.named_modules():
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.max_norm is not None:
            raise UsageError(
                f"{name}.weight is renormalised in forward (max_norm), which would be lost with the gathered copy",
                "drop max_norm, and normalise what the embedding returns",
            )
    _refuse_shared_memory(module)


def has_overlap(tensor: torch.Tensor) -> bool:
    """Whether a tensor is expanded: more elements than places in memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that holds each place in memory once."""
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class LoopCalls:
    """Calls of a plain PyTorch loop that would do nothing, or not what they say, once an engine has taken over.

    Gradients are in the engine, so ``zero_grad()`` of the optimizer and of the module becomes the engine's; stepping the
    optimizer by itself would update nothing, and copying or pickling the module would take its hooks along without the
    engine: both are refused.

    Args:
        module: The model.
        optimizer: The optimizer over slices.
        zero_grad: The engine's.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, zero_grad: Callable[[], None]
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._handle = optimizer.register_step_pre_hook(_refuse_lone_step)

        def stand_in(set_to_none: bool = True) -> None:
            zero_grad()

        optimizer.zero_grad = stand_in  # type: ignore[method-assign]
        module.zero_grad = stand_in  # type: ignore[method-assign]
        module.__reduce_ex__ = _refuse_copy  # type: ignore[method-assign,assignment]

    def give_back(self) -> None:
        """Undo it."""
        self._handle.remove()
        self._optimizer.__dict__.pop("zero_grad", None)
        self._module.__dict__.pop("zero_grad", None)
        self._module.__dict__.pop("__reduce_ex__", None)


def _refuse_lone_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Only while the engine steps has a slice a gradient."""
    if not any(param.grad is not None for group in optimizer.param_groups for param in group["params"]):
        raise UsageError(
            "optimizer.step() finds no gradients: they are in the engine", "call engine.step() instead"
        )


def _refuse_copy(protocol: Any) -> Any:
    raise UsageError(
        "a model that an engine has taken over cannot be copied or pickled: it is partitioned",
        "build it anew and load engine.state_dict(), or save with engine.save()",
    )


def _refuse_shared_memory(module: nn.Module) -> None:
    """Different parameters over the same memory are tied in plain PyTorch; each on its own they would drift."""
    tensors: list[tuple[str, torch.Tensor]] = [*module.named_parameters(), *_buffers_over_parameters(module)]
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        if tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for sharing in by_storage.values():
        if len(sharing) < 2:
            continue
        owner = torch.full((max(_extent(tensor) for _, tensor in sharing),), -1, dtype=torch.int32)
        for index, (name, tensor) in enumerate(sharing):
            places = owner.as_strided(
                tensor.shape, _in_bytes(tensor), tensor.storage_offset() * tensor.itemsize
            )
            taken = int(places.max())
            if taken >= 0:
                raise UsageError(
                    f"{sharing[taken][0]} and {name} are two tensors over the same memory, so that one changes with "
                    "the other; partitioned they would drift apart",
                    "make them one nn.Parameter object, registered under both names",
                )
            without_repeats(places).fill_(index)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes of the storage that a tensor reaches; the storage itself may be empty (a deferred build)."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.itemsize


def _in_bytes(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride * tensor.itemsize for stride in tensor.stride())


def _buffers_over_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    storages = {param.untyped_storage()._cdata for param in module.parameters()}
    for name, buffer in module.named_buffers():
        is_plain = buffer.layout is torch.strided and not is_wrapper(type(buffer))
        if is_plain and buffer.untyped_storage()._cdata in storages:
            yield name, buffer

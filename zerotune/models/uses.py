"""Announcing the uses of units: hooks on modules, in forward and in backward.

A unit's use in forward is a call of its module. Its use in backward begins when the gradient of one of the call's
outputs is about to be propagated, and ends when the gradients of all its inputs are complete; where no input needs a
gradient (an embedding), it ends with the backward pass.

The entry is a pre-hook on the output's graph node and the exit a hook on the input tensors, because autograd runs
tensor hooks before node pre-hooks: between two blocks that share a tensor, the later block's exit comes before the
earlier block's entry, and at most one of them is in use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from zerotune.schedule import Phase


class UseListener(Protocol):
    """Who is told of uses."""

    def begin_forward(self, module: nn.Module) -> None:
        """The root's forward begins."""

    def end_forward(self) -> None:
        """The root's forward has returned."""

    def enter(self, phase: Phase, scope: str, units: tuple[int, ...]) -> None:
        """A use of ``units`` by the module named ``scope`` begins."""

    def exit(self, phase: Phase, scope: str, units: tuple[int, ...]) -> None:
        """It ends."""


class _Call:
    """One call of a module that uses units. ``state`` is of the latest backward pass through it."""

    __slots__ = ("backward", "is_open", "scope", "units")

    def __init__(self, scope: str, units: tuple[int, ...]) -> None:
        self.scope = scope
        self.units = units
        self.backward = -1
        self.is_open = False


class UseWatcher:
    """Hooks on a model that tell a listener which units are in use.

    Args:
        root: The model.
        uses: For each module that uses units: its name and the units' indices.
        listener: Who is told.
    """

    def __init__(
        self, root: nn.Module, uses: Mapping[nn.Module, tuple[str, tuple[int, ...]]], listener: UseListener
    ) -> None:
        self._listener = listener
        self._calls: list[_Call] = []
        self._open_backward: list[_Call] = []
        self._backward = 0
        self._in_backward = False
        self._handles = [root.register_forward_pre_hook(self._begin_forward, with_kwargs=True)]
        for module, (scope, units) in uses.items():
            self._handles.append(
                module.register_forward_pre_hook(self._before_forward(scope, units), with_kwargs=True)
            )
            self._handles.append(module.register_forward_hook(self._after_forward))
        self._handles.append(root.register_forward_hook(self._end_forward))

    def begin_backward(self) -> None:
        """A backward pass begins; hooks that fire from here on belong to it."""
        self._backward += 1
        self._in_backward = True

    def end_backward(self) -> None:
        """It has returned: uses that are still open end now, the latest first."""
        while self._open_backward:
            self._exit_backward(self._open_backward[-1])
        self._in_backward = False

    def reset(self) -> None:
        """Forget calls that an exception cut short."""
        self._calls.clear()
        self._open_backward.clear()
        self._in_backward = False

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.reset()

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._listener.begin_forward(module)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._listener.end_forward()

    def _before_forward(self, scope: str, units: tuple[int, ...]) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = _Call(scope, units)
            self._calls.append(call)
            self._listener.enter(Phase.FORWARD, scope, units)
            if torch.is_grad_enabled():
                inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
                if inputs:
                    register_multi_grad_hook(inputs, lambda grads: self._exit_backward(call), mode="all")

        return before

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._calls.pop()
        self._listener.exit(Phase.FORWARD, call.scope, call.units)
        if torch.is_grad_enabled():
            nodes = {t.grad_fn for t in tensors_in(output) if t.requires_grad and t.grad_fn is not None}
            for node in nodes:
                node.register_prehook(lambda grads: self._enter_backward(call))

    def _enter_backward(self, call: _Call) -> None:
        if call.backward == self._backward:
            return  # another output of the same call came first
        if not self._in_backward:
            raise RuntimeError("gradients are propagated outside the engine: call engine.backward(loss)")
        call.backward = self._backward
        call.is_open = True
        self._open_backward.append(call)
        self._listener.enter(Phase.BACKWARD, call.scope, call.units)

    def _exit_backward(self, call: _Call) -> None:
        if not call.is_open:
            return
        call.is_open = False
        self._open_backward.remove(call)
        self._listener.exit(Phase.BACKWARD, call.scope, call.units)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, mappings and dataclasses, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))

"""Announcing the uses of units: hooks on modules, in forward, in recomputation and in backward.

A unit's use in forward is a call of its module. Its use in backward begins when the gradient of one of the call's
outputs is about to be propagated, and ends when the gradients of all its inputs are complete; where no input needs a
gradient (an embedding), it ends with the backward pass.

The entry is a pre-hook on the output's graph node and the exit a hook on the input tensors, because autograd runs
tensor hooks before node pre-hooks: between two blocks that share a tensor, the later block's exit comes before the
earlier block's entry, and at most one of them is in use.

[Note: recomputation]
A call inside a backward pass recomputes activations. Non-reentrant checkpointing stops the recomputed forward early by
an exception, so its exit hooks may never run; such calls end at the next event of the backward pass. Reentrant
checkpointing runs a backward pass of its own inside the outer one, over leaf inputs whose hooks autograd may run before
the last parameter's gradient is there; uses that begin in it end when that inner pass does.

[Note: uses discovered by access]
A module may read a weight that is not its own (``F.linear(h, self.emb.weight)``). Whoever notices (see
:mod:`zerotune.models.access`) calls :meth:`UseWatcher.add_use`: from then on the unit belongs to the uses of the innermost
watched module that was running.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from zerotune.config.errors import UsageError
from zerotune.models.marks import ENGINE, is_profiled, mark
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


class _Scope:
    """A watched module: its name, and the units that its calls use (more may be discovered)."""

    __slots__ = ("name", "units")

    def __init__(self, name: str, units: tuple[int, ...]) -> None:
        self.name = name
        self.units = units


class _Call:
    """One call of a watched module. ``units`` are those it announced, so that entry and exit agree."""

    __slots__ = ("backward", "graph_task", "is_open", "phase", "scope", "units")

    def __init__(self, scope: _Scope, phase: Phase) -> None:
        self.scope = scope
        self.phase = phase
        self.units = scope.units
        self.backward = -1
        self.is_open = False
        self.graph_task = -1


class UseWatcher:
    """Hooks on a model that tell a listener which units are in use.

    The root is always watched, so that whatever runs, runs inside a watched module.

    Args:
        root: The model.
        uses: For each module that uses units: its name and the units' indices.
        listener: Who is told.
    """

    def __init__(
        self, root: nn.Module, uses: Mapping[nn.Module, tuple[str, tuple[int, ...]]], listener: UseListener
    ) -> None:
        self._listener = listener
        self._calls: list[_Call] = []  # running forwards, innermost last
        self._open_backward: list[_Call] = []
        self._backward = 0
        self._in_backward = False
        self._graph_tasks: set[int] = set()
        # First in, last out: hooks of the user's run inside the use, and may read the weights.
        self._handles = []
        for module, (name, units) in {root: ("(root)", ()), **uses}.items():
            scope = _Scope(name, units)
            before = self._before_forward(scope)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(self._after_forward(scope)))
        self._handles.append(
            root.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True)
        )
        self._handles.append(root.register_forward_hook(self._end_forward))

    def begin_backward(self) -> None:
        """A backward pass begins; hooks that fire from here on belong to it."""
        self._backward += 1
        self._in_backward = True
        self._graph_tasks.clear()

    def end_backward(self) -> None:
        """It has returned: uses that are still open end now, the latest first."""
        self._end_recomputation()
        while self._open_backward:
            self._exit_backward(self._open_backward[-1])
        self._in_backward = False

    def add_use(self, unit: int) -> None:
        """Count a unit among the uses of the innermost watched module that is running, now and from now on."""
        call = self._open_backward[-1] if self._in_backward and not self._calls else self._calls[-1]
        if unit not in call.scope.units:
            call.scope.units = (*call.scope.units, unit)
        if unit not in call.units:
            call.units = (*call.units, unit)

    @property
    def is_running(self) -> bool:
        """Whether a watched module runs, forward or backward."""
        return bool(self._calls or self._open_backward)

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

    def _announce(self, call: _Call, phase: Phase) -> None:
        if is_profiled():
            with mark(ENGINE):
                self._listener.enter(phase, call.scope.name, call.units)
        else:
            self._listener.enter(phase, call.scope.name, call.units)

    def _announce_end(self, call: _Call, phase: Phase) -> None:
        if is_profiled():
            with mark(ENGINE):
                self._listener.exit(phase, call.scope.name, call.units)
        else:
            self._listener.exit(phase, call.scope.name, call.units)

    # -------------------------------------------------------------------------------------------------- forward

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_recomputing:
            with mark(ENGINE):
                self._listener.begin_forward(module)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_recomputing:
            self._listener.end_forward()

    @property
    def _is_recomputing(self) -> bool:
        return self._in_backward and torch._C._current_graph_task_id() != -1

    def _before_forward(self, scope: _Scope) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = _Call(scope, Phase.RECOMPUTE if self._is_recomputing else Phase.FORWARD)
            self._announce(call, call.phase)
            self._calls.append(call)
            if torch.is_grad_enabled():
                # A leaf's hook may run before the last parameter's gradient is there (see [Note: recomputation]).
                found = args if len(args) == 1 and not kwargs else (args, kwargs)
                inputs = [t for t in tensors_in(found) if t.requires_grad and t.grad_fn is not None]
                _when_all_have_grads(inputs, lambda grads: self._exit_backward(call))

        return before

    def _after_forward(self, scope: _Scope) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            call = self._calls.pop()
            self._announce_end(call, call.phase)
            while call.scope is not scope:  # a call inside this one raised, and the model caught it
                call = self._calls.pop()
                self._announce_end(call, call.phase)
            if torch.is_grad_enabled():
                nodes = {t.grad_fn for t in tensors_in(output) if t.requires_grad and t.grad_fn is not None}
                for node in nodes:
                    node.register_prehook(lambda grads: self._enter_backward(call))

        return after

    # ------------------------------------------------------------------------------------------------- backward

    def _enter_backward(self, call: _Call) -> None:
        if call.backward == self._backward:
            return  # another output of the same call came first
        if not self._in_backward:
            raise UsageError(
                "gradients are propagated outside the engine, which can then not gather weights or reduce gradients",
                "call engine.backward(loss) instead of loss.backward() or torch.autograd.grad",
            )
        self._end_recomputation()
        call.backward = self._backward
        call.is_open = True
        call.graph_task = torch._C._current_graph_task_id()
        call.units = call.scope.units
        if call.graph_task not in self._graph_tasks:
            task = call.graph_task
            self._graph_tasks.add(task)
            Variable._execution_engine.queue_callback(lambda: self._end_graph_task(task))
        self._open_backward.append(call)
        self._announce(call, Phase.BACKWARD)

    def _exit_backward(self, call: _Call) -> None:
        if not call.is_open:
            return
        self._end_recomputation()
        call.is_open = False
        self._open_backward.remove(call)
        self._announce_end(call, Phase.BACKWARD)

    def _end_graph_task(self, task: int) -> None:
        """A backward pass, perhaps one inside another, has propagated everything: its uses end."""
        for call in [c for c in reversed(self._open_backward) if c.graph_task == task]:
            self._exit_backward(call)

    def _end_recomputation(self) -> None:
        """End recomputed forwards that were stopped early: nothing else runs a forward between backward events."""
        while self._calls and self._calls[-1].phase is Phase.RECOMPUTE:
            call = self._calls.pop()
            self._announce_end(call, call.phase)


def _when_all_have_grads(inputs: list[torch.Tensor], then: Callable[[Any], None]) -> None:
    """Call a function in every backward pass once the gradients of all inputs are there; never for no inputs."""
    if len(inputs) == 1:
        inputs[0].register_hook(then)  # it need not count, nor hold the graph, and costs a fifth of the other
    elif inputs:
        register_multi_grad_hook(inputs, then, mode="all")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples, mappings and dataclasses, in a fixed order."""
    if type(value) is tuple and len(value) == 1 and isinstance(value[0], torch.Tensor):
        return [value[0]]  # what nearly every module is called with
    found: list[torch.Tensor] = []
    _find_tensors(value, found)
    return found


def _find_tensors(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _find_tensors(item, found)
    elif isinstance(value, (str, int, float, type(None))):  # common, and slow to tell from what follows
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            _find_tensors(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _find_tensors(getattr(value, field.name), found)

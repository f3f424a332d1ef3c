"""What checkpoints ask of the engine: its slices, the open window, small values, the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from zerotune import checkpoints
from zerotune.checkpoints import Checkpointable, FlatSlice, RankWindow, Weight
from zerotune.config.errors import UsageError
from zerotune.engine import RankGroup
from zerotune.schedule import slice_bounds
from zerotune.zero.collector import Collector
from zerotune.zero.executor import Executor
from zerotune.zero.scaler import LossScaler, SkippedSteps
from zerotune.zero.shards import ShardedParam, ShardStore
from zerotune.zero.updater import Updater


class CheckpointMixin:
    """The part of :class:`~zerotune.zero.engine.ZeroEngine` that saves and loads."""

    module: nn.Module
    group: RankGroup
    optimizer: torch.optim.Optimizer
    shards: ShardStore
    steps: int
    _executor: Executor
    _reducer: Collector
    _loss_sum: torch.Tensor
    _weight_sum: float
    _scaler: LossScaler
    _skipped: SkippedSteps

    _begin_window: Callable[[], None]
    _full_master: Callable[[ShardedParam], torch.Tensor]
    _is_replicated: bool
    _updater: Updater

    @property
    def _as_saved(self) -> Checkpointable:
        return cast(Checkpointable, self)

    def save(
        self,
        folder: str | Path,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> Path | None:
        """Save parameters, optimizer, random states and the open accumulation window; a collective call.

        Args:
            folder: Folder of checkpoints, on storage that all ranks share.
            step: Number to save it under. Default: the steps taken.
            extra: More to keep with it, as JSON: the state of a scheduler or of the data, say.
            wait: ``False`` writes in the background; what goes wrong is raised by the next save or by
                :meth:`finish_save`.

        Returns:
            Path of the checkpoint; ``None`` without ``wait``.

        Raises:
            RunFailed: It could not be written; every rank raises.
        """
        step = self.steps if step is None else step
        if wait:
            return checkpoints.save(self._as_saved, folder, step, extra)
        checkpoints.begin_save(self._as_saved, folder, step, extra)
        return None

    def finish_save(self) -> Path | None:
        """Wait for a save in the background; a collective call. Returns its path, or ``None`` if there was none."""
        return checkpoints.finish_save(self._as_saved)

    def load(self, folder: str | Path, restart_window: bool = False) -> dict[str, Any]:
        """Load the newest complete checkpoint of a folder, or the one named; a collective call.

        Args:
            folder: Where :meth:`save` saved, on any number of ranks and at any stage.
            restart_window: Go back to the first micro-batch of a window that was saved half-way.

        Returns:
            The ``extra`` that was saved; :attr:`steps` says how many steps it has taken.

        Raises:
            UsageError: There is none, or it does not fit.
        """
        return checkpoints.load(self._as_saved, folder, restart_window)[1]

    def load_weights(self, path: str | Path, strict: bool = True) -> None:
        """Load plain weights from a safetensors file or a folder of them; a collective call, between steps.

        See :func:`zerotune.checkpoints.load_weights`.

        Args:
            path: Readable on every rank; each reads its own slices.
            strict: Whether the files must hold exactly what the model's ``state_dict()`` does.

        Raises:
            UsageError: They do not fit the model.
        """
        checkpoints.load_weights(self._as_saved, path, strict)

    # --------------------------------------------------------------------- what zerotune.checkpoints asks for

    def sharded_state(self) -> dict[str, torch.Tensor]:
        """This rank's part of parameters, buffers and optimizer state (see :mod:`zerotune.checkpoints`).

        Parameters are the fp32 masters. The tensors share memory with the engine's, so that loading writes into it.
        """
        state: dict[str, torch.Tensor] = {}
        for param in self.shards.params:
            state[f"model/{param.name}"] = self._real_part(param, param.master)
            for key, value in self.optimizer.state.get(param.master, {}).items():
                if isinstance(value, torch.Tensor):
                    is_sliced = value.shape == param.master.shape and value.dim() == 1
                    state[f"optimizer/{param.name}/{key}"] = (
                        self._real_part(param, value) if is_sliced else value
                    )
        for name, buffer in self.module.state_dict(keep_vars=True).items():
            if not isinstance(buffer, nn.Parameter) and isinstance(buffer, torch.Tensor):
                state[f"buffer/{name}"] = buffer.detach()
        return state

    def expect_optimizer_state(self, found: Mapping[str, Mapping[str, tuple[torch.dtype, bool]]]) -> None:
        """Make room for optimizer state that is about to be loaded."""
        by_name = {param.name: param for param in self.shards.params}
        for name in found:
            if name not in by_name:
                raise UsageError(f"the checkpoint has optimizer state of {name}, which is not in the model")
        for name, param in by_name.items():
            state = self.optimizer.state.pop(param.master, {})
            for key, (dtype, is_sliced) in found.get(name, {}).items():
                if key not in state:
                    like = (
                        param.master.detach()
                        if is_sliced
                        else torch.empty((), device=_state_device(self.optimizer))
                    )
                    state[key] = torch.zeros_like(like, dtype=dtype)
            if state:
                self.optimizer.state[param.master] = {
                    k: v for k, v in state.items() if k in found.get(name, {})
                }
        self._updater.count_state(anew=True)  # as many entries may be others

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Settings of the optimizer's groups, without the parameters."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def set_optimizer_groups(self, groups: list[dict[str, Any]]) -> None:
        """Load what :meth:`optimizer_groups` gave.

        Raises:
            UsageError: There is another number of groups.
        """
        if len(groups) != len(self.optimizer.param_groups):
            raise UsageError(
                f"the checkpoint has {len(groups)} parameter groups, the optimizer {len(self.optimizer.param_groups)}"
            )
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})

    def optimizer_values(self) -> dict[str, dict[str, Any]]:
        """Optimizer state that is no tensor, by parameter."""
        values = {}
        for param in self.shards.params:
            state = self.optimizer.state.get(param.master, {})
            plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
            if plain:
                values[param.name] = plain
        return values

    def set_optimizer_values(self, values: dict[str, dict[str, Any]]) -> None:
        """Load what :meth:`optimizer_values` gave."""
        for param in self.shards.params:
            if param.name in values:
                self.optimizer.state[param.master].update(values[param.name])

    def engine_values(self) -> dict[str, Any]:
        """Small state that shapes the next step."""
        return {"loss_scale": self._scaler.state(), "skipped_in_a_row": self._skipped.in_a_row}

    def set_engine_values(self, values: dict[str, Any]) -> None:
        """Load what :meth:`engine_values` gave."""
        self._scaler.load(values.get("loss_scale"))
        self._skipped.in_a_row = int(values.get("skipped_in_a_row", 0))

    def window(self) -> tuple[int, RankWindow]:
        """Micro-batches in the open window, none of whose reductions is under way, and this rank's part of its sums."""
        self._executor.finish_open_passes()
        self._reducer.drain()
        trainable = self.shards.trainable
        return self._executor.window_position, RankWindow(
            loss=float(self._loss_sum),
            weight=self._weight_sum,
            untouched=[param.name for param in trainable if not param.is_touched],
            held=[param.name for param in trainable if param.param.grad is not None],
        )

    def set_window(self, position: int, mine: RankWindow | None, summed: Iterable[str]) -> None:
        """Drop the open window and begin another, with sums that are loaded next; empty if ``position`` is 0."""
        self._begin_window()
        held, kept = set(mine.held if mine else ()), set(summed)
        if kept:
            self.shards.make_all_grads()
        for param in self.shards.params:
            full = param.param
            full.grad = torch.zeros_like(full, dtype=full.grad_dtype) if param.name in held else None
            param.has_grad = param.name in kept
        self._reducer.count_waiting()
        if mine is None:
            return
        self._executor.window_position = position
        self._loss_sum.fill_(mine.loss)
        self._weight_sum = mine.weight
        untouched = set(mine.untouched)
        for param in self.shards.trainable:
            param.is_touched = param.name not in untouched

    def window_gradients(self) -> dict[str, torch.Tensor]:
        """This rank's part of the window's gradient sums, and its full gradients that are not reduced yet."""
        state: dict[str, torch.Tensor] = {}
        for param in self.shards.params:
            if param.has_grad:
                if param.grad is None:
                    raise UsageError(
                        f"the checkpoint has a gradient of {param.name}, which is frozen here",
                        "load it with restart_window=True",
                    )
                state[f"gradient/{param.name}"] = self._real_part(param, param.grad)
            if param.param.grad is not None:
                state[f"held-gradient/{self.group.rank}/{param.name}"] = param.param.grad
        return state

    def weights(self) -> list[Weight]:
        """What the model's ``state_dict()`` holds, in its order."""
        managed: dict[Any, ShardedParam] = {param.param: param for param in self.shards.params}
        seen: dict[Any, str] = {}
        weights = []
        for name, value in self.module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                raise UsageError(f"{name} is extra state of a module, not a tensor; it can not be exported")
            identity = value if value in managed else _memory_of(value, name)
            first = seen.setdefault(identity, name)
            param = managed.get(value)
            weights.append(
                Weight(
                    name=name,
                    shape=tuple(value.shape),
                    dtype=str(torch.float32 if param is not None else value.dtype).removeprefix("torch."),
                    key=None if first != name else f"model/{param.name}" if param else f"buffer/{name}",
                    same_as=first if first != name else None,
                )
            )
        return weights

    def _real_part(self, param: ShardedParam, values: torch.Tensor) -> FlatSlice:
        """The elements of a master, or of optimizer state laid out like it, that are not padding."""
        if self._is_replicated:
            return FlatSlice.of(values[: param.numel], 0, param.numel)
        start, end = slice_bounds(param.numel, self.group.size, self.group.rank)
        return FlatSlice.of(values[: end - start], start, param.numel)

    def full_parameter(self, name: str) -> torch.Tensor:
        """One parameter, full, fp32, on the CPU; collective."""
        return self._full_master(next(param for param in self.shards.params if param.name == name))


def _state_device(optimizer: torch.optim.Optimizer) -> torch.device:
    """Where scalar optimizer state (``step``) lives: beside the parameters for fused and capturable optimizers."""
    group = optimizer.param_groups[0]
    on_device = group.get("fused") or group.get("capturable")
    device: torch.device = group["params"][0].device
    return device if on_device else torch.device("cpu")


def _memory_of(buffer: torch.Tensor, name: str) -> tuple[Any, ...]:
    """What is the same for two names of one buffer."""
    if buffer.numel() == 0:
        return (name,)
    return (buffer.data_ptr(), tuple(buffer.shape), buffer.stride(), buffer.dtype)

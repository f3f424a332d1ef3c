"""Full parameters of a partitioned model: as a state, to be read in place, and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerotune.config.errors import UsageError
from zerotune.engine import RankGroup
from zerotune.engine.meeting import meet
from zerotune.schedule import Layout, slice_bounds
from zerotune.zero.comm import Communicator
from zerotune.zero.gatherer import Gatherer
from zerotune.zero.shards import ShardedParam, ShardStore


class FullStateMixin:
    """The part of :class:`~zerotune.zero.engine.ZeroEngine` that makes whole what is partitioned, and the other way round."""

    module: nn.Module
    group: RankGroup
    layout: Layout
    shards: ShardStore
    flush: Callable[[], None]
    refresh: Callable[[], None]
    _comm: Communicator
    _gatherer: Gatherer
    _is_replicated: bool

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Full parameters and buffers on the CPU, as the plain module's ``state_dict()``; a collective call.

        Every rank gets all of it; parameters are fp32 whatever the precision. At most one parameter is gathered at a time.
        """
        meet(self.group, "full_state_dict")
        full: dict[torch.Tensor, torch.Tensor] = {}
        for param in self.shards.params:
            full[param.param] = self._full_master(param)
        state: dict[str, torch.Tensor] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                state[name] = value  # what a module keeps beside its tensors (get_extra_state)
                continue
            state[name] = full[value] if value in full else value.detach().cpu().clone()
        return state

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside it every parameter is full on every rank, to be read (not written); a collective call, between steps."""
        self.flush()
        units = [u for u in range(len(self.layout.units)) if u not in self.layout.persistent_units]
        try:
            for unit in units:
                self._gatherer.gather((unit,), "read")
                self._gatherer.wait((unit,))
            yield
        finally:
            self._gatherer.release(units)
            self.flush()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The same as :meth:`full_state_dict`."""
        return self.full_state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load full parameters and buffers, as the plain module's ``load_state_dict``.

        Args:
            state: As :meth:`full_state_dict` gives it; the same on every rank.

        Raises:
            UsageError: A name is missing or unknown, or a shape differs.
        """
        self.flush()
        own: dict[str, Any] = self.module.state_dict(keep_vars=True)
        missing, unknown = sorted(set(own) - set(state)), sorted(set(state) - set(own))
        if missing or unknown:
            raise UsageError(
                f"the state does not fit the model: missing {missing[:3]}, unknown {unknown[:3]}"
            )
        by_identity: dict[Any, ShardedParam] = {p.param: p for p in self.shards.params}
        for name, value in own.items():
            if not isinstance(value, torch.Tensor):  # what a module keeps beside its tensors
                self.module.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])
                continue
            if tuple(value.shape) != tuple(state[name].shape):
                raise UsageError(
                    f"{name} has shape {tuple(state[name].shape)}, the model's is {tuple(value.shape)}"
                )
            sharded = by_identity.get(value)
            if sharded is None:
                value.data.copy_(state[name])
            else:
                self._load_master(sharded, state[name])
        self.refresh()

    def _full_master(self, param: ShardedParam) -> torch.Tensor:
        """One parameter, full, fp32, on the CPU  # ND"""
        if self._is_replicated or self.group.size == 1:
            flat = param.master.detach()
        else:
            own = param.master.detach()
            received = own.new_empty(param.slice * self._comm.rows_received)
            self._comm.all_gather(received, own, "export", [param.name]).wait()
            flat = torch.cat(self._comm.rows_in_order(received, own))
        return flat[: param.numel].view(param.param.shape).cpu().clone()

    def _load_master(self, param: ShardedParam, value: torch.Tensor) -> None:
        param.master.detach().copy_(self._slice_of(param, value.to(self.group.device, torch.float32)))

    def _slice_of(self, param: ShardedParam, value: torch.Tensor) -> torch.Tensor:
        """What a master holds of a full tensor of the parameter's shape, zeros where it holds padding  # 1D"""
        flat = value.detach().reshape(-1)
        part = flat.new_zeros(param.master.numel())
        start, end = (
            (0, param.numel)
            if self._is_replicated
            else slice_bounds(param.numel, self.group.size, self.group.rank)
        )
        part[: end - start].copy_(flat[start:end])
        return part

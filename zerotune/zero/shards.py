"""Parameters partitioned inside layers: flattened, padded, and one contiguous slice of each kept per rank.

[Note: storages]
A managed parameter stays the module's own ``nn.Parameter``. Its storage holds the flattened, padded parameter; to
release it the storage is resized to nothing, to restore it the storage is resized back and filled. Views that autograd
saved (``weight.t()``) share the storage, so they are freed and restored with it; assigning ``param.data`` would leave
them holding the old memory. Filling goes through a separate tensor on the same storage, whose version counter is not
the parameter's, so autograd does not take it for an in-place change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerotune.engine import LedgerKeeper
from zerotune.models.units import Unit
from zerotune.records import ByteClass
from zerotune.schedule import Layout, ParamRef, slice_bounds


@dataclass
class ShardedParam:
    """One parameter and this rank's slice of it.

    Attributes:
        ref: Unit and index.
        name: Its first name in the module.
        param: The module's parameter  # ND
        numel: Its elements, without padding.
        slice: Elements of one slice, S.
        rows: The full, padded parameter on the parameter's own storage  # [N, S]
        shard: This rank's slice in the compute dtype, what is sent in gathers  # 1D
        master: What the optimizer updates: this rank's slice, or all slices at stage 0  # 1D
        grad: Where reduced gradients are summed, fp32, as long as ``master``  # 1D
        persistent: Whether the full parameter stays.
        has_grad: Whether ``grad`` holds anything since the last step.
    """

    ref: ParamRef
    name: str
    param: nn.Parameter
    numel: int
    slice: int
    rows: torch.Tensor
    shard: torch.Tensor
    master: nn.Parameter
    grad: torch.Tensor | None
    persistent: bool
    has_grad: bool = False

    @property
    def full_bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()

    def resize(self, is_full: bool) -> None:
        """Free or restore the storage of the full parameter; what it holds after restoring is arbitrary."""
        self.rows.untyped_storage().resize_(self.full_bytes if is_full else 0)


class ShardedUnit:
    """A unit's parameters and the flat buffer of those that are gathered.

    Args:
        name: For the ledger.
        params: All its parameters.
        flat: This rank's slices of the gathered (not persistent) ones, one after the other  # 1D
    """

    def __init__(self, name: str, params: list[ShardedParam], flat: torch.Tensor) -> None:
        self.name = name
        self.params = params
        self.flat = flat
        self.gathered = [p for p in params if not p.persistent]
        self.slices = [p.slice for p in self.gathered]
        self.rows = [p.rows for p in self.gathered]
        self.full_bytes = sum(p.full_bytes for p in self.gathered)

    def allocate(self) -> None:
        """Restore the storages of the full parameters."""
        for param in self.gathered:
            param.resize(is_full=True)

    def free(self) -> None:
        """Free the storages of the full parameters."""
        for param in self.gathered:
            param.resize(is_full=False)


class ShardStore:
    """All parameters of a model, partitioned.

    At stage 0 nothing is partitioned: every parameter is persistent and its master holds all slices, laid out alike.

    Args:
        units: The model's units.
        layout: Their sizes over N ranks.
        rank: This rank.
        stage: 0 or 3.
        compute_dtype: Dtype of the full parameters and of gathers.
        device: Device of everything.
        ledger: Counts the bytes.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        layout: Layout,
        rank: int,
        stage: int,
        compute_dtype: torch.dtype,
        device: torch.device,
        ledger: LedgerKeeper,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._stage = stage
        self._dtype = compute_dtype
        self._device = device
        self._ledger = ledger
        self.units: list[ShardedUnit] = []
        refs = list(layout.refs())
        persistent_width = sum(layout.slice(r) for r in refs if layout.param(r).persistent)
        # Slices of persistent parameters lie together, so that one AllGather refreshes them all.
        self.persistent_flat = self._new_shards(persistent_width if stage == 3 else 0)
        self.persistent: list[ShardedParam] = []
        self._masters: list[torch.Tensor] = []
        persistent_offset = 0
        persistent_master = self._new_masters(self.persistent_flat)
        for index, unit in enumerate(units):
            width = sum(
                layout.slice(ParamRef(index, i))
                for i, p in enumerate(layout.units[index].params)
                if not p.persistent
            )
            flat = self._new_shards(width)
            flat_master = self._new_masters(flat)
            offset = 0
            params: list[ShardedParam] = []
            for i, (name, param) in enumerate(zip(unit.names, unit.params, strict=True)):
                ref = ParamRef(index, i)
                if stage == 0:
                    sharded = self._replicate(ref, name, param)
                elif layout.param(ref).persistent:
                    sharded = self._partition(
                        ref, name, param, self.persistent_flat, persistent_master, persistent_offset
                    )
                    persistent_offset += sharded.slice
                else:
                    sharded = self._partition(ref, name, param, flat, flat_master, offset)
                    offset += sharded.slice
                params.append(sharded)
                if sharded.persistent:
                    self.persistent.append(sharded)
            self.units.append(ShardedUnit(layout.units[index].name, params, flat))
        self.params = [p for unit in self.units for p in unit.params]
        self.flat_grads = self._new_grads()

    def __getitem__(self, ref: ParamRef) -> ShardedParam:
        return self.units[ref.unit].params[ref.index]

    @property
    def trainable(self) -> list[ShardedParam]:
        """Parameters that get gradients, in the order of units."""
        return [p for p in self.params if p.grad is not None]

    def refresh_shards(self) -> None:
        """Bring the working copies of this rank up to date with the masters, after the optimizer or a load."""
        if self._dtype is torch.float32:
            return  # the masters are the working copies
        with torch.no_grad():
            for param in self.params:
                target = param.rows.view(-1) if self._stage == 0 else param.shard
                target.copy_(param.master)

    def restore(self) -> None:
        """Give the module plain parameters again: this rank's full copies must be complete."""
        for param in self.params:
            full = param.rows.reshape(-1)[: param.numel].view(param.param.shape)
            param.param.data = full.clone()

    def release_everything(self) -> None:
        """Drop all storage held here and take it off the ledger."""
        for byte_class in (ByteClass.SHARD, ByteClass.GRADIENT):
            self._ledger.add(byte_class, -self._ledger.bytes(byte_class))
        self.params.clear()
        self.units.clear()
        self.persistent.clear()
        self.flat_grads.clear()
        self._masters.clear()

    # ------------------------------------------------------------------------------------------------ set-up

    def _new_shards(self, width: int) -> torch.Tensor:
        flat = torch.zeros(width, dtype=self._dtype, device=self._device)
        self._ledger.add(ByteClass.SHARD, flat.nbytes)
        return flat

    def _new_masters(self, flat: torch.Tensor) -> torch.Tensor:
        """fp32 masters: the shards themselves where they are fp32, copies otherwise (counted as optimizer state)."""
        if flat.dtype is torch.float32:
            return flat
        master = torch.zeros(flat.numel(), dtype=torch.float32, device=self._device)
        self._ledger.add(ByteClass.OPTIMIZER, master.nbytes)
        return master

    def _take_over(self, param: nn.Parameter, slice_numel: int) -> torch.Tensor:
        """Move a parameter onto a storage of its padded size  # [N, S]"""
        numel = param.numel()
        full = torch.zeros(slice_numel * self._layout.ranks, dtype=self._dtype, device=self._device)
        with torch.no_grad():
            full[:numel].copy_(param.detach().reshape(-1))
        param.data = full[:numel].view(param.shape)
        self._ledger.add(ByteClass.FULL, full.nbytes)
        return full.view(self._layout.ranks, slice_numel)

    def _partition(
        self,
        ref: ParamRef,
        name: str,
        param: nn.Parameter,
        flat: torch.Tensor,
        flat_master: torch.Tensor,
        offset: int,
    ) -> ShardedParam:
        size = self._layout.slice(ref)
        start, end = slice_bounds(param.numel(), self._layout.ranks, self._rank)
        shard = flat[offset : offset + size]
        master = flat_master[offset : offset + size]
        with torch.no_grad():
            # The master takes the value before the compute dtype rounds it.
            master[: end - start].copy_(param.detach().reshape(-1)[start:end])
        rows = self._take_over(param, size)
        if shard.dtype is not torch.float32:
            shard.copy_(master)
        persistent = self._layout.param(ref).persistent
        sharded = ShardedParam(
            ref, name, param, param.numel(), size, rows, shard, _leaf(master), None, persistent
        )
        if not persistent:
            sharded.resize(is_full=False)
            self._ledger.add(ByteClass.FULL, -sharded.full_bytes)
        return sharded

    def _replicate(self, ref: ParamRef, name: str, param: nn.Parameter) -> ShardedParam:
        size = self._layout.slice(ref)
        numel = param.numel()
        if self._dtype is torch.float32:
            rows = self._take_over(param, size)
            master = rows.view(-1)
        else:
            master = torch.zeros(size * self._layout.ranks, dtype=torch.float32, device=self._device)
            self._ledger.add(ByteClass.OPTIMIZER, master.nbytes)
            with torch.no_grad():
                master[:numel].copy_(param.detach().reshape(-1))
            rows = self._take_over(param, size)
        return ShardedParam(ref, name, param, numel, size, rows, rows[self._rank], _leaf(master), None, True)

    def _new_grads(self) -> list[torch.Tensor]:
        """One flat gradient buffer per unit, in the order of its parameters, and views of it per parameter."""
        flats = []
        for unit in self.units:
            trainable = [p for p in unit.params if p.param.requires_grad]
            flat = torch.zeros(
                sum(p.master.numel() for p in trainable), dtype=torch.float32, device=self._device
            )
            self._ledger.add(ByteClass.GRADIENT, flat.nbytes)
            offset = 0
            for param in trainable:
                param.grad = flat[offset : offset + param.master.numel()]
                offset += param.master.numel()
            if flat.numel():
                flats.append(flat)
        return flats


def _leaf(master: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(master.detach(), requires_grad=True)

"""Parameters partitioned inside layers: flattened, padded, and one contiguous slice of each kept per rank.

[Note: storages]
A managed parameter stays the module's own ``nn.Parameter``. The parameters of a unit that are gathered share one storage,
which holds each of them flattened and padded, one after the other; to release the unit the storage is resized to nothing,
to restore it the storage is resized back and filled. Views that autograd
saved (``weight.t()``) share the storage, so they are freed and restored with it; assigning ``param.data`` would leave
them holding the old memory. Filling goes through a separate tensor on the same storage, whose version counter is not
the parameter's, so autograd does not take it for an in-place change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zerotune.engine import LedgerKeeper
from zerotune.models.access import make_partitioned, plain_class
from zerotune.models.deferred import take_over, values_of
from zerotune.models.units import Unit
from zerotune.records import ByteClass
from zerotune.schedule import Layout, ParamRef, slice_bounds


@dataclass
class ShardedParam:
    """One parameter and this rank's slice of it.

    Attributes:
        ref: Unit, and place in it.
        name: Its first name in the module.
        param: The module's parameter  # ND
        numel: Its elements, without padding.
        slice: Elements of one slice, S.
        rows: The full, padded parameter on the parameter's own storage  # [N, S]
        shard: This rank's slice in the compute dtype, what is sent in gathers; of a persistent parameter, its place
            in the full one  # 1D
        master: What the optimizer updates, fp32: this rank's slice, or all slices at stage 0. Where the compute
            dtype is fp32 it is the shard itself  # 1D
        grad: Where reduced gradients are summed, as long as ``master``; ``None`` for a frozen parameter, and while
            the store holds none  # 1D
        persistent: Whether the full parameter stays.
        trains: Whether it gets gradients in this accumulation window.
        has_grad: Whether ``grad`` holds anything since the last step.
        is_touched: Whether it had a gradient on this rank in this accumulation window.
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
    trains: bool = False
    has_grad: bool = False
    is_touched: bool = False

    @property
    def full_bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()


class SlicesInTurn:
    """Parameters whose slices travel one after the other, and the places that each rank's slices go to.

    Args:
        params: Whose.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.params = params
        self.sizes = [p.slice for p in params]
        self.width = sum(self.sizes)
        self._places: dict[tuple[int, int, int], list[torch.Tensor]] = {}

    def copy_out(self, rows: torch.Tensor, first: int, end: int) -> None:
        """From rank-major to parameter-major order.

        Args:
            rows: What some ranks sent  # [end - first, W], or [W] of a single one
            first: The first of these ranks.
            end: The one after the last.
        """
        key = (first, end, rows.dim())
        places = self._places.get(key)
        if places is None:
            where = first if rows.dim() == 1 else slice(first, end)
            places = self._places[key] = [p.rows[where] for p in self.params]
        torch.split_with_sizes_copy(rows, self.sizes, dim=-1, out=places)  # none of them requires a gradient


class ShardedUnit:
    """A unit's parameters, and those that are gathered as one.

    Args:
        name: For the ledger.
        params: All its parameters; ``trainable`` those that get gradients now.
        flat: This rank's slices of the gathered (not persistent) ones, one after the other  # 1D
        full: These parameters, full and padded, one after the other; its storage comes and goes  # 1D
    """

    def __init__(self, name: str, params: list[ShardedParam], flat: torch.Tensor, full: torch.Tensor) -> None:
        self.name = name
        self.params = params
        self.flat = flat
        self._storage = full.untyped_storage()
        self.gathered = [p for p in params if not p.persistent]
        self.width = flat.numel()
        self.full_bytes = sum(p.full_bytes for p in self.gathered)
        """Bytes that come with :meth:`allocate` and go with :meth:`free`."""
        self.trainable: list[ShardedParam] = []
        self._classes: list[tuple[nn.Parameter, type[nn.Parameter], type[nn.Parameter]]] = []

    def allocate(self) -> None:
        """Restore the storage of the full parameters; what it holds then is arbitrary."""
        self._storage.resize_(self.full_bytes)

    def free(self) -> None:
        """Free the storage of the full parameters."""
        self._storage.resize_(0)

    def report_reads(self, to: Callable[[ShardedParam], None]) -> None:
        """Report reads of the gathered parameters, but for those between :meth:`expose` and :meth:`conceal`."""
        for param in self.gathered:
            make_partitioned(param.param, partial(to, param))
        self._classes = [(p.param, type(p.param), plain_class(p.param)) for p in self.gathered]

    @property
    def is_watched(self) -> bool:
        """Whether some of its parameters' reads are reported."""
        return bool(self._classes)

    def expose(self) -> None:
        """A use of the unit is open: its parameters are ordinary ones."""
        for param, _, plain in self._classes:
            param.__class__ = plain

    def conceal(self) -> None:
        """No use is open any more."""
        for param, partitioned, _ in self._classes:
            param.__class__ = partitioned


class ShardStore:
    """All parameters of a model, partitioned as the stage says.

    Below stage 3, and on a rank that is alone, every parameter is persistent. Its master and gradient are this rank's
    slice, but at stage 0, where they hold all slices, laid out alike, so that the optimizer sees the same lanes.

    Args:
        units: The model's units.
        layout: Their sizes over N ranks.
        rank: This rank.
        stage: 0 to 3.
        compute_dtype: Dtype of the full parameters and of gathers.
        device: Device of everything.
        ledger: Counts the bytes.
        grad_dtype: Dtype in which gradients are kept.
        sums_full_grads: Whether micro-batches are summed in the full gradients of every rank, and only the window's
            sum is reduced.
        values: Makes the context in which a parameter has its first values, in its shape; asked once for each, in
            the order of units, and left before the next.
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
        grad_dtype: torch.dtype = torch.float32,
        sums_full_grads: bool = False,
        values: Callable[[nn.Parameter], AbstractContextManager[torch.Tensor]] = values_of,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._stage = stage
        self._dtype = compute_dtype
        self._device = device
        self._ledger = ledger
        self._grad_dtype = grad_dtype
        self._sums_full_grads = sums_full_grads
        self._values = values
        self.units: list[ShardedUnit] = []
        for index, unit in enumerate(units):
            sizes = layout.units[index].params
            width = sum(
                layout.slice(ParamRef(index, i)) for i, size in enumerate(sizes) if not size.persistent
            )
            flat = self._zeros(width, compute_dtype, ByteClass.SHARD)
            # fp32 masters: the shards themselves where they are fp32, copies otherwise, counted as optimizer state.
            masters = (
                flat
                if compute_dtype is torch.float32
                else self._zeros(width, torch.float32, ByteClass.OPTIMIZER)
            )
            offset = 0
            params: list[ShardedParam] = []
            for i, (name, param) in enumerate(zip(unit.names, unit.params, strict=True)):
                ref = ParamRef(index, i)
                if stage == 0:
                    params.append(self._replicate(ref, name, param))
                elif sizes[i].persistent:
                    params.append(self._persist(ref, name, param))
                else:
                    place = slice(offset, offset + layout.slice(ref))
                    params.append(self._partition(ref, name, param, flat[place], masters[place]))
                    offset = place.stop
            self.units.append(self._unit(layout.units[index].name, params, flat))
        self.params = [p for unit in self.units for p in unit.params]
        self.persistent = [p for p in self.params if p.persistent]
        self.trainable: list[ShardedParam] = []
        """Parameters that get gradients, in the order of units; another list whenever they are others."""
        self._flat_grads: dict[int, list[torch.Tensor]] = {}
        self._adopted: set[int] = set()
        self.note_trainable()

    def __getitem__(self, ref: ParamRef) -> ShardedParam:
        return self.units[ref.unit].params[ref.place]

    def refresh_shards(self, params: Sequence[ShardedParam] | None = None) -> None:
        """Bring the working copies of this rank up to date with the masters, after the optimizer or a load.

        Args:
            params: Of which parameters; ``None`` for all.
        """
        if self._dtype is torch.float32:
            return  # the masters are the working copies
        params = self.params if params is None else params
        if params:
            with torch.no_grad():
                targets = [p.rows.view(-1) if self._stage == 0 else p.shard for p in params]
                torch._foreach_copy_(targets, [p.master.detach() for p in params])

    def note_trainable(self) -> None:
        """Gradients are those of the parameters that require one now.

        Between two accumulation windows only: what was summed is lost.
        """
        self.forget_grads()
        for param in self.params:
            param.trains = param.param.requires_grad
            # Full gradients that are summed over micro-batches have the dtype that gradients are kept in.
            param.param.grad_dtype = self._grad_dtype if self._sums_full_grads else self._dtype
        for unit in self.units:
            unit.trainable = [p for p in unit.params if p.trains]
        self.trainable = [p for unit in self.units for p in unit.trainable]

    def forget_grads(self) -> None:
        """The step is over: nothing is summed any more, and gradients take no memory until the next reduction lands.

        Where activations are most, at the beginning of backward, there are none.
        """
        self._ledger.add(ByteClass.GRADIENT, -sum(flat.nbytes for flat in self.flat_grads))
        self._flat_grads.clear()
        self._adopted.clear()
        for param in self.params:
            param.grad = None
            param.has_grad = False
            param.is_touched = False

    @property
    def flat_grads(self) -> list[torch.Tensor]:
        """Gradients of the units that have any, in the order of units: one buffer each, or those that were adopted."""
        return [flat for index in sorted(self._flat_grads) for flat in self._flat_grads[index]]

    @property
    def keeps_fp32_grads(self) -> bool:
        """Whether reduced gradients are kept in fp32."""
        return self._grad_dtype is torch.float32

    def has_grads(self, index: int) -> bool:
        """Whether a unit has its gradient buffer."""
        return index in self._flat_grads

    def make_grads(self, index: int) -> None:
        """Give a unit gradients, zeros, unless it has some."""
        if index not in self._flat_grads:
            flat = self.new_grads(index)
            if flat is not None:
                flat.zero_()

    def new_grads(self, index: int) -> torch.Tensor | None:
        """One flat gradient buffer for a unit that has none, and views of it per parameter.

        Returns:
            The buffer, which holds what is arbitrary; ``None`` if nothing of the unit trains  # 1D
        """
        assert index not in self._flat_grads
        trainable = self.units[index].trainable
        sizes = [p.master.numel() for p in trainable]
        if not sum(sizes):
            for param in trainable:  # without an element, and yet the optimizer's
                param.grad = torch.empty(0, dtype=self._grad_dtype, device=self._device)
            return None
        flat = torch.empty(sum(sizes), dtype=self._grad_dtype, device=self._device)
        self._ledger.add(ByteClass.GRADIENT, flat.nbytes)
        for param, piece in zip(trainable, flat.split(sizes), strict=True):
            param.grad = piece
        self._flat_grads[index] = [flat]
        return flat

    def adopt_grads(self, index: int, grads: Sequence[torch.Tensor]) -> bool:
        """Let a unit that has no gradients take these for its own.

        Args:
            index: The unit.
            grads: One per trainable parameter of it  # S of each, 1D

        Returns:
            Whether it did: only if each gradient is all of its memory, and no two share it, of these and those that were
            adopted before. autograd may give two parameters views of one tensor.
        """
        storages = [grad.untyped_storage() for grad in grads]
        owners = {storage._cdata for storage in storages}
        sizes = [storage.nbytes() for storage in storages]
        if len(owners) < len(grads) or not owners.isdisjoint(self._adopted):
            return False
        if sizes != [grad.nbytes for grad in grads]:
            return False
        assert index not in self._flat_grads
        for param, grad in zip(self.units[index].trainable, grads, strict=True):
            param.grad = grad
        self._flat_grads[index] = list(grads)
        self._adopted |= owners
        self._ledger.take(ByteClass.GRADIENT, grads)
        return True

    def make_all_grads(self) -> None:
        """Gradient buffers for every unit."""
        for index in range(len(self.units)):
            self.make_grads(index)

    @contextmanager
    def update_grads(self, factor: float) -> Iterator[list[torch.Tensor]]:
        """The gradients that the optimizer is given, times a factor: fp32, in the order of :attr:`trainable`.

        Those that are kept in fp32 are scaled in place; of others there is a copy inside the context.
        """
        self.make_all_grads()
        if self._grad_dtype is torch.float32:
            if factor != 1.0:
                torch._foreach_mul_(self.flat_grads, factor)
            yield [p.grad for p in self.trainable if p.grad is not None]
            return
        wide = [flat.float() for flat in self.flat_grads]
        if factor != 1.0:
            torch._foreach_mul_(wide, factor)
        held = sum(flat.nbytes for flat in wide)
        self._ledger.add(ByteClass.GRADIENT, held)
        flats = iter(wide)
        pieces: list[torch.Tensor] = []
        for unit in self.units:
            sizes = [p.master.numel() for p in unit.trainable]
            whole = next(flats) if sum(sizes) else torch.empty(0, device=self._device)
            pieces += whole.split(sizes) if sizes else []
        try:
            yield pieces
        finally:
            self._ledger.add(ByteClass.GRADIENT, -held)

    def release_everything(self) -> None:
        """Drop all storage held here and take it off the ledger."""
        for byte_class in (ByteClass.SHARD, ByteClass.FULL, ByteClass.GRADIENT):
            self._ledger.add(byte_class, -self._ledger.bytes(byte_class))
        self.params.clear()
        self.trainable.clear()
        self.units.clear()
        self.persistent.clear()
        self._flat_grads.clear()

    # ------------------------------------------------------------------------------------------------ set-up

    def _zeros(self, width: int, dtype: torch.dtype, byte_class: ByteClass) -> torch.Tensor:
        flat = torch.zeros(width, dtype=dtype, device=self._device)
        self._ledger.add(byte_class, flat.nbytes)
        return flat

    def _fill(self, param: nn.Parameter, slice_numel: int, values: torch.Tensor) -> torch.Tensor:
        """Give a parameter a storage of its own, padded, that stays  # [N, S]

        Args:
            param: The parameter.
            slice_numel: S.
            values: What it holds then.
        """
        numel = param.numel()
        full = torch.zeros(slice_numel * self._layout.ranks, dtype=self._dtype, device=self._device)
        with torch.no_grad():
            full[:numel].copy_(values.reshape(-1))
        self._ledger.add(ByteClass.FULL, full.nbytes)
        _put(param, full)
        return full.view(self._layout.ranks, slice_numel)

    def _partition(
        self,
        ref: ParamRef,
        name: str,
        param: nn.Parameter,
        shard: torch.Tensor,
        master: torch.Tensor,
    ) -> ShardedParam:
        with self._values(param) as values:
            self._fill_master(values, master)  # before the compute dtype rounds the value
        if shard.dtype is not torch.float32:
            shard.copy_(master)
        rows = torch.empty(0, dtype=self._dtype, device=self._device)  # see _unit
        return ShardedParam(
            ref, name, param, param.numel(), shard.numel(), rows, shard, _leaf(master), None, False
        )

    def _unit(self, name: str, params: list[ShardedParam], flat: torch.Tensor) -> ShardedUnit:
        """Put the parameters that are gathered into one storage, which has no memory yet."""
        gathered = [p for p in params if not p.persistent]
        ranks = self._layout.ranks
        full = torch.empty(flat.numel() * ranks, dtype=self._dtype, device=self._device)
        for param, padded in zip(gathered, full.split([p.slice * ranks for p in gathered]), strict=True):
            _put(param.param, padded)
            param.rows = padded.view(ranks, param.slice)
        full.untyped_storage().resize_(0)
        return ShardedUnit(name, params, flat, full)

    def _persist(self, ref: ParamRef, name: str, param: nn.Parameter) -> ShardedParam:
        size = self._layout.slice(ref)
        with self._values(param) as values:
            if self._dtype is not torch.float32:
                master = self._zeros(size, torch.float32, ByteClass.OPTIMIZER)
                self._fill_master(values, master)
            rows = self._fill(param, size, values)
        if self._dtype is torch.float32:
            master = rows[self._rank]
        return ShardedParam(
            ref, name, param, param.numel(), size, rows, rows[self._rank], _leaf(master), None, True
        )

    def _replicate(self, ref: ParamRef, name: str, param: nn.Parameter) -> ShardedParam:
        size, numel = self._layout.slice(ref), param.numel()
        with self._values(param) as values:
            if self._dtype is not torch.float32:
                master = self._zeros(size * self._layout.ranks, torch.float32, ByteClass.OPTIMIZER)
                with torch.no_grad():
                    master[:numel].copy_(values.reshape(-1))
            rows = self._fill(param, size, values)
        if self._dtype is torch.float32:
            master = rows.view(-1)
        return ShardedParam(ref, name, param, numel, size, rows, rows[self._rank], _leaf(master), None, True)

    def _fill_master(self, values: torch.Tensor, master: torch.Tensor) -> None:
        start, end = slice_bounds(values.numel(), self._layout.ranks, self._rank)
        with torch.no_grad():
            master[: end - start].copy_(values.reshape(-1)[start:end])


def _put(param: nn.Parameter, padded: torch.Tensor) -> None:
    """Make a parameter the beginning of a padded buffer, whatever it was before."""
    own = padded[: param.numel()].view(param.shape)
    take_over(param)
    param.data = own


def _leaf(master: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(master.detach(), requires_grad=True)

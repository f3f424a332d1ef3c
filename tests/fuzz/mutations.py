"""Deliberate mistakes, made inside the ranks: each stands for one that the engine could really make.

Every entry of :data:`MUTATIONS` takes (rank, size) and gives a context within which the engine is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from zerotune.engine import RankGroup
from zerotune.models import uses
from zerotune.models.units import Unit
from zerotune.schedule import OnDemand, Phase
from zerotune.zero import engine, reducer, shards
from zerotune.zero.comm import Communicator
from zerotune.zero.engine import ZeroEngine
from zerotune.zero.executor import Executor
from zerotune.zero.gatherer import Gatherer
from zerotune.zero.reducer import Reducer

Mutation = Callable[[int, int], AbstractContextManager[object]]


def wrong_divisor(rank: int, size: int) -> AbstractContextManager[object]:
    """Sums over ranks are averaged before they are divided by the weight."""
    right = reducer._sum_rows

    def averaged(output: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        right(output, rows)
        output.div_(size)

    return patch.object(reducer, "_sum_rows", averaged)


def slice_off_by_one(rank: int, size: int) -> AbstractContextManager[object]:
    """What a rank keeps of a parameter begins one element late."""
    right = shards.slice_bounds

    def late(numel: int, ranks: int, rank: int) -> tuple[int, int]:
        start, end = right(numel, ranks, rank)
        return (start + 1, end) if end - start > 1 else (start, end)

    return patch.object(shards, "slice_bounds", late)


def gradient_off_by_one(rank: int, size: int) -> AbstractContextManager[object]:
    """Gradients are shifted by one element when they are split."""
    right = reducer._copy_rows

    def shifted(target: torch.Tensor, gradient: torch.Tensor, numel: int) -> None:
        right(target, gradient.reshape(-1).roll(1), numel)

    return patch.object(reducer, "_copy_rows", shifted)


def slices_swapped(rank: int, size: int) -> AbstractContextManager[object]:
    """The slices of the ranks are assembled in the wrong order."""
    right = Communicator.parts

    def swapped(self: Communicator, received: torch.Tensor, own: torch.Tensor) -> Any:
        parts = right(self, received, own)
        rows = [rows for rows, _, _ in reversed(parts)]
        return [(row, first, end) for row, (_, first, end) in zip(rows, parts, strict=True)]

    return patch.object(Communicator, "parts", swapped)


def backward_entry_dropped(rank: int, size: int) -> AbstractContextManager[object]:
    """The hook that announces a use in backward is not there."""
    return patch.object(uses.UseWatcher, "_enter_backward", lambda self, call: None)


def backward_exit_dropped(rank: int, size: int) -> AbstractContextManager[object]:
    """The hook that ends a use in backward is not there: everything stays until backward has returned."""
    return patch.object(uses, "_when_all_have_grads", lambda inputs, then: None)


def released_too_early(rank: int, size: int) -> AbstractContextManager[object]:
    """The end of one use releases a unit that another use still holds."""
    right = OnDemand.after

    def after(self: OnDemand, event: Any, complete: Any, open_uses: Any) -> Any:
        return right(self, event, complete, {})

    return patch.object(OnDemand, "after", after)


def released_while_recomputed(rank: int, size: int) -> AbstractContextManager[object]:
    """The end of a recomputation releases what the backward pass around it needs."""
    right = Executor.exit

    def leave(self: Executor, phase: Phase, scope: str, units: tuple[int, ...]) -> None:
        right(self, phase, scope, units)
        if phase is Phase.RECOMPUTE:
            self._gatherer.release([unit for unit in units if unit in self._gatherer.complete])

    return patch.object(Executor, "exit", leave)


def one_member_lost(rank: int, size: int) -> AbstractContextManager[object]:
    """A bucket with several gradients loses the last one."""
    right = Reducer.collect

    def collect(self: Reducer, index: int, bucket: Any, refs: Any) -> None:
        if len(refs) > 1:
            self._shards[refs[-1]].param.grad = None
        right(self, index, bucket, refs)

    return patch.object(Reducer, "collect", collect)


def padding_in_the_norm(rank: int, size: int) -> AbstractContextManager[object]:
    """Padding travels as it is found, and is summed into the norm."""
    right = reducer._copy_rows

    def filled(target: torch.Tensor, gradient: torch.Tensor, numel: int) -> None:
        target.fill_(0.5)
        width = target.shape[1]
        padded = torch.full_like(target, 0.5)
        right(target, gradient, numel)
        flat = torch.arange(target.numel()).view(-1, width)
        target.copy_(torch.where(flat < numel, target, padded))

    return patch.object(reducer, "_copy_rows", filled)


def persistent_not_refreshed(rank: int, size: int) -> AbstractContextManager[object]:
    """Persistent parameters keep the other ranks' slices of before the step."""
    return patch.object(Gatherer, "refresh_persistent", lambda self, bucket_size: None)


def last_micro_batch_wins(rank: int, size: int) -> AbstractContextManager[object]:
    """A micro-batch's gradients overwrite those of the one before."""
    right = Reducer._add

    def add(self: Reducer, targets: Any, sums: Any, members: Any) -> None:
        for param in members:
            param.has_grad = False
        right(self, targets, sums, members)

    return patch.object(Reducer, "_add", add)


def clip_factor_per_rank(rank: int, size: int) -> AbstractContextManager[object]:
    """Every rank clips by the norm of its own slices."""
    right = RankGroup.gather_numbers

    def gather(self: RankGroup, values: list[float]) -> list[list[float]]:
        rows = right(self, values)
        if len(values) >= 5:  # what a step exchanges: loss, weight, squares, …
            for row in rows:
                row[2] = values[2]
        return rows

    return patch.object(RankGroup, "gather_numbers", gather)


def stale_shard(rank: int, size: int) -> AbstractContextManager[object]:
    """The optimizer updates a copy: what is gathered stays as it was."""
    right = shards._leaf
    return patch.object(shards, "_leaf", lambda master: right(master.detach().clone()))


@contextmanager
def tied_reduced_per_user(rank: int, size: int) -> Iterator[None]:
    """A shared parameter's gradient counts once per module that owns it."""
    owners: dict[Any, int] = {}
    cut, collect = engine.cut_into_units, Reducer.collect

    def counting(module: torch.nn.Module, *args: Any) -> list[Unit]:
        owners.clear()
        for submodule in module.modules():
            for param in submodule._parameters.values():
                if param is not None:
                    owners[param] = owners.get(param, 0) + 1
        return cut(module, *args)

    def per_user(self: Reducer, index: int, bucket: Any, refs: Any) -> None:
        for ref in refs:
            param = self._shards[ref].param
            if param.grad is not None:
                param.grad = param.grad * owners[param]
        collect(self, index, bucket, refs)

    with patch.object(engine, "cut_into_units", counting), patch.object(Reducer, "collect", per_user):
        yield


def unused_gets_zeros(rank: int, size: int) -> AbstractContextManager[object]:
    """A parameter without a gradient is updated as if its gradient were zero (weight decay moves it)."""
    return patch.object(ZeroEngine, "_unused_everywhere", lambda self: set())


def weights_ignored(rank: int, size: int) -> AbstractContextManager[object]:
    """Micro-batches count alike, however many items they have."""
    right = ZeroEngine.backward

    def backward(self: ZeroEngine, loss: torch.Tensor, weight: float = 1.0, **options: Any) -> None:
        right(self, loss, 1.0, **options)

    return patch.object(ZeroEngine, "backward", backward)


def ranks_reduce_apart(rank: int, size: int) -> AbstractContextManager[object]:
    """A rank adds its own gradients only."""

    def own(output: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        output.copy_(rows[rank])

    return patch.object(reducer, "_sum_rows", own)


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        wrong_divisor,
        slice_off_by_one,
        gradient_off_by_one,
        slices_swapped,
        backward_entry_dropped,
        backward_exit_dropped,
        released_too_early,
        released_while_recomputed,
        one_member_lost,
        padding_in_the_norm,
        persistent_not_refreshed,
        last_micro_batch_wins,
        clip_factor_per_rank,
        stale_shard,
        tied_reduced_per_user,
        unused_gets_zeros,
        weights_ignored,
        ranks_reduce_apart,
    )
}

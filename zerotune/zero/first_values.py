"""A model's first values: rank 0's, on every rank, or those of files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zerotune.engine import RankGroup
from zerotune.models.deferred import is_deferred, values_of
from zerotune.zero.comm import Communicator
from zerotune.zero.refusals import without_repeats

SETUP_BUCKET_BYTES = 32 * 2**20
"""Bytes that one broadcast of set-up carries, at most: a collective per parameter would cost more than it moves."""


class FirstValues:
    """Where every parameter's first values come from.

    Args:
        module: The model.
        group: The ranks.
        comm: Broadcasts.
        loaded: Names of what is loaded from files later, and has no values before.
    """

    def __init__(
        self, module: nn.Module, group: RankGroup, comm: Communicator, loaded: Collection[str]
    ) -> None:
        self._module = module
        self._group = group
        self._comm = comm
        named = module.named_parameters(remove_duplicate=False)
        self._is_loaded = {param for name, param in named if name in loaded}

    def agree(self) -> None:
        """Every rank starts from rank 0's values: ranks that were seeded differently would train another model each."""
        if self._group.size == 1:
            return
        params = self._module.parameters()
        present = [p for p in params if not is_deferred(p) and p not in self._is_loaded]
        values = [without_repeats(t.detach()) for t in (*present, *self._module.buffers())]
        for bucket in _in_buckets(values, SETUP_BUCKET_BYTES):
            flat = torch.cat([value.reshape(-1) for value in bucket])
            self._comm.broadcast(flat, "setup")
            for value, agreed in zip(bucket, flat.split([v.numel() for v in bucket]), strict=True):
                value.copy_(agreed.view(value.shape))

    @contextmanager
    def of(self, param: nn.Parameter) -> Iterator[torch.Tensor]:
        """A parameter's values, rank 0's; those of a deferred build are made there, and only inside. What is loaded from
        files has none before: zeros stand in."""
        if param in self._is_loaded:
            yield torch.zeros((), dtype=param.dtype, device=self._group.device).expand(param.shape)
            return
        with values_of(param, make=self._group.rank == 0) as values:
            if is_deferred(param) and self._group.size > 1:
                contiguous = values.contiguous()
                self._comm.broadcast(contiguous, "setup")
                if contiguous is not values:
                    values.copy_(contiguous)
            yield values


def _in_buckets(tensors: Iterable[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Tensors of one dtype together, up to ``limit`` bytes (a larger tensor alone)."""
    buckets: list[list[torch.Tensor]] = []
    filling: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = filling.get(tensor.dtype)
        if bucket is None or sum(t.nbytes for t in bucket) + tensor.nbytes > limit:
            bucket = filling[tensor.dtype] = []
            buckets.append(bucket)
        bucket.append(tensor)
    return buckets

"""Reusing communication buffers, because allocating large ones anew each step costs page faults."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch

from zerotune.engine import LedgerKeeper
from zerotune.records import ByteClass

MAX_FREE_PER_SIZE = 2
"""Idle buffers kept of one size: with one being filled and one in flight, more are never idle at once for long."""


RARE = 3
"""A size that is taken less than a third as often as the commonest is not kept: the buffer of the one embedding would
lie idle for all of a step, and its memory is most missed where activations are most."""


class BufferPool:
    """Idle 1-D buffers by size and dtype. Only idle ones are counted as pooled; a taken one is its user's.

    All buffers are taken, used and given back in the order of the current stream; whoever uses one on another
    stream makes both streams wait for each other (see :mod:`zerotune.zero.comm`).

    Args:
        device: Where buffers live.
        ledger: Counts idle bytes.
    """

    def __init__(self, device: torch.device, ledger: LedgerKeeper) -> None:
        self._device = device
        self._ledger = ledger
        self._taken: Counter[tuple[int, torch.dtype]] = Counter()
        self._most_taken = 0
        self._lost: list[torch.Tensor] = []
        self._idle: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of exactly ``numel`` elements (1D); its contents are arbitrary."""
        key = (numel, dtype)
        self._taken[key] = count = self._taken[key] + 1
        if count > self._most_taken:
            self._most_taken = count
        idle = self._idle.get(key)
        if idle:
            buffer = idle.pop()
            self._ledger.add(ByteClass.POOLED, -buffer.nbytes)
            return buffer
        if torch.is_inference_mode_enabled():
            # A tensor made there could not be written to in a training step.
            with torch.inference_mode(False):
                return torch.empty(numel, dtype=dtype, device=self._device)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Give a buffer back; if its size is rare, or enough of it are idle, it is freed."""
        key = (buffer.numel(), buffer.dtype)
        if self._taken[key] * RARE < self._most_taken:
            return
        idle = self._idle[key]
        if len(idle) < MAX_FREE_PER_SIZE:
            idle.append(buffer)
            self._ledger.add(ByteClass.POOLED, buffer.nbytes)

    def lose(self, buffer: torch.Tensor) -> None:
        """Keep a buffer for good that a collective which will not end may still write to."""
        self._lost.append(buffer)

    def flush(self) -> None:
        """Free all idle buffers."""
        for idle in self._idle.values():
            for buffer in idle:
                self._ledger.add(ByteClass.POOLED, -buffer.nbytes)
        self._idle.clear()

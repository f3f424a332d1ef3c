"""The optimizer's update, and every copy of the parameters brought up to date with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from zerotune.engine import LedgerKeeper
from zerotune.records import ByteClass
from zerotune.schedule import ParamRef
from zerotune.zero.executor import Executor
from zerotune.zero.gatherer import Gatherer
from zerotune.zero.optimizer import dividing_gradients, optimizer_bytes, steps_in_parts
from zerotune.zero.shards import ShardedParam, ShardStore


class Updater:
    """Updates the masters, and lets every copy follow.

    Args:
        optimizer: Over the masters.
        shards: They, and their copies.
        executor: Issues what the next window begins with.
        gatherer: Refreshes persistent parameters.
        ledger: Counts the optimizer's bytes.
        has_copies: Whether persistent parameters are copies of other ranks' slices, which a refresh brings.
        refresh_bucket: Elements per AllGather of a refresh, at most; ``None`` for one AllGather.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: ShardStore,
        executor: Executor,
        gatherer: Gatherer,
        ledger: LedgerKeeper,
        has_copies: bool,
        refresh_bucket: int | None,
    ) -> None:
        self._optimizer = optimizer
        self._shards = shards
        self._executor = executor
        self._gatherer = gatherer
        self._ledger = ledger
        self._has_copies = has_copies
        self._refresh_bucket = refresh_bucket
        self._bytes = 0
        self._entries = 0  # of the optimizer's state, when they were counted

    def update(self, factor: float, unused: Collection[ParamRef]) -> None:
        """Update the masters by the summed gradients.

        What the next window needs first is updated first, so that it travels while the rest is updated.

        Args:
            factor: What gradients are multiplied by first.
            unused: Parameters without a gradient on any rank: the optimizer leaves them alone.
        """
        trainable = self._shards.trainable
        opening = {unit for gather in self._executor.next_opening for unit in gather.units}
        in_parts = bool(opening) and steps_in_parts(self._optimizer)
        with dividing_gradients(self._optimizer, factor) as left, self._shards.update_grads(left) as grads:
            pairs = list(zip(trainable, grads, strict=True))
            if unused:
                pairs = [(p, g) for p, g in pairs if p.ref not in unused]
            first = [pair for pair in pairs if pair[0].persistent or pair[0].ref.unit in opening]
            rest = [pair for pair in pairs if not pair[0].persistent and pair[0].ref.unit not in opening]
            if not in_parts:
                first, rest = pairs, []
            self._optimize(first)
            refresh = self._refresh()
            next(refresh, None)
            self._executor.open_next_window()
            self._optimize(rest)
            for _ in refresh:
                pass
        self.count_state()

    def publish(self) -> None:
        """Bring every copy up to date with masters that were written from outside."""
        self._shards.refresh_shards()
        for _ in self._refresh():
            pass

    def count_state(self, anew: bool = False) -> None:
        """Let the ledger count the optimizer's state.

        Args:
            anew: Even if it has as many entries as when it was last counted.
        """
        entries = sum(map(len, self._optimizer.state.values()))
        if entries == self._entries and not anew:
            return
        self._entries = entries
        now = optimizer_bytes(self._optimizer)
        if now != self._bytes:
            self._ledger.add(ByteClass.OPTIMIZER, now - self._bytes)
            self._bytes = now

    def _optimize(self, pairs: list[tuple[ShardedParam, torch.Tensor]]) -> None:
        """Update the masters of some parameters by their gradients, and their shards."""
        if not pairs:
            return
        for param, grad in pairs:
            param.master.grad = grad
        self._optimizer.step()
        for param, _ in pairs:
            param.master.grad = None
        self._shards.refresh_shards([param for param, _ in pairs])

    def _refresh(self) -> Iterator[None]:
        """Bring persistent parameters up to date with the shards; see :meth:`Gatherer.refresh_persistent`."""
        if not self._has_copies:
            return iter(())
        return self._gatherer.refresh_persistent(self._refresh_bucket)

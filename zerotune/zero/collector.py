"""Full gradients, as autograd leaves them at the parameters: each is taken once in a pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from zerotune.engine import LedgerKeeper
from zerotune.models.access import not_reading
from zerotune.records import ByteClass
from zerotune.schedule import Bucket, ParamRef
from zerotune.zero.shards import ShardedParam, ShardStore


class Collector(ABC):
    """Carries out the reductions of a schedule: full gradients in, sums over ranks added to the shards' gradients.

    Args:
        shards: The parameters.
        ledger: Counts bytes.
    """

    def __init__(self, shards: ShardStore, ledger: LedgerKeeper) -> None:
        self._shards = shards
        self._ledger = ledger
        self._waiting_bytes = 0  # of full gradients that the ledger counts
        self._collected: list[Sequence[ParamRef]] = []
        self.left_out: dict[int, float] = {}
        """Share of the bytes of each unit's latest reduction that need not be sent; of a unit that is missing, none."""
        self.looks_for_trouble = False
        """Whether to look at every full gradient, at the price of reading it once more, for :attr:`first_trouble`."""
        self.first_trouble: ShardedParam | None = None
        """The first parameter since it was last cleared whose gradient on this rank was not finite."""

    @abstractmethod
    def collect(self, index: int, bucket: Bucket, refs: Sequence[ParamRef]) -> None:
        """Take full gradients from their parameters; a parameter without one counts as zeros.

        Args:
            index: The bucket's index, unique within the pass.
            bucket: Its members.
            refs: The members to collect now.
        """

    @abstractmethod
    def reduce(self, index: int) -> None:
        """Issue the reduction of a bucket."""

    @abstractmethod
    def drain(self, keep: int = 0) -> None:
        """Finish the oldest reductions until at most ``keep`` are in flight; none will finish if ranks diverged."""

    @abstractmethod
    def abandon(self) -> None:
        """Reduce what has been collected of unfinished buckets as it stands.

        For a pass that leaves the recorded order: members that were not collected travel as zeros, and come later.
        """

    def clear(self) -> None:
        """Drop everything, after an error."""
        self._collected.clear()

    @abstractmethod
    def forget(self) -> None:
        """Let go of what is remembered of parameters that are no more."""

    def uncollected(self) -> list[ParamRef]:
        """Trainable parameters that no bucket of this pass took yet, or whose gradient came after it did."""
        collected = set(chain.from_iterable(self._collected))
        with not_reading():
            return [
                p.ref for p in self._shards.trainable if p.ref not in collected or p.param.grad is not None
            ]

    def late(self) -> list[ParamRef]:
        """Parameters whose gradient is still full: autograd delivered it after their bucket was filled."""
        with not_reading():
            return [p.ref for p in self._shards.trainable if p.param.grad is not None]

    def end_pass(self) -> None:
        """The next bucket belongs to a new pass."""
        self._collected.clear()

    def count_waiting(self) -> None:
        """Let the ledger count the full gradients there are: they wait for the step."""
        now = sum(p.param.grad.nbytes for p in self._shards.params if p.param.grad is not None)
        self._ledger.add(ByteClass.GRADIENT, now - self._waiting_bytes)
        self._waiting_bytes = now

    def _full(
        self, params: Sequence[ShardedParam], owners: Sequence[nn.Parameter]
    ) -> list[torch.Tensor | None]:
        """Full gradients; they stay where they are until :meth:`_drop`.

        Args:
            params: Whose.
            owners: The module's own parameters of these.
        """
        with not_reading():
            grads = [owner.grad for owner in owners]
        if self.looks_for_trouble:
            self._look_for_trouble(params, grads)
        return grads

    def _drop(
        self,
        params: Sequence[ShardedParam],
        owners: Sequence[nn.Parameter],
        grads: Sequence[torch.Tensor | None],
    ) -> None:
        """They have been taken: the parameters have none any more."""
        with not_reading():
            for owner, param, grad in zip(owners, params, grads, strict=True):
                if grad is not None:
                    owner.grad = None
                    param.is_touched = True

    def _uncount(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Full gradients wait no longer; those that came since they were counted never did."""
        if self._waiting_bytes:
            taken = min(self._waiting_bytes, sum(grad.nbytes for grad in grads if grad is not None))
            self._waiting_bytes -= taken
            self._ledger.add(ByteClass.GRADIENT, -taken)

    def _look_for_trouble(self, params: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]) -> None:
        for param, grad in zip(params, grads, strict=True):
            if self.first_trouble is not None:
                return
            if grad is not None and not bool(grad.isfinite().all()):
                self.first_trouble = param


def add_into(
    targets: Sequence[torch.Tensor | None], sums: Sequence[torch.Tensor], params: Sequence[ShardedParam]
) -> None:
    """Put sums into gradients that are empty, add them to those that are not.

    Args:
        targets: Gradients, or parts of them; nothing is done where there is none.
        sums: As long.
        params: Whose gradients they are.
    """
    for has_grad, put in ((False, torch._foreach_copy_), (True, torch._foreach_add_)):
        pairs = [
            (target, total)
            for target, total, param in zip(targets, sums, params, strict=True)
            if target is not None and param.has_grad is has_grad
        ]
        if pairs:
            put([target for target, _ in pairs], [total for _, total in pairs])

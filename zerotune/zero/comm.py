"""Collectives of the ZeRO engine. What differs between gloo on CPU and NCCL on CUDA is in this file alone.

[Note: streams]
On CUDA, gathers and reductions run on a stream of their own each. A collective first makes its stream wait for the
current one, so that inputs are written and earlier readers of the output buffer are done; waiting for it makes the
current stream wait for its event. Buffers are allocated, read and given back on the current stream only, between
these two points, so no ``record_stream`` is needed and nothing waits on the host.

[Note: order of summation]
On gloo every reduction is an exchange (all-to-all) followed by a local sum in rank order, in fp32: the same bits for
every bucket size, half the time of gloo's own reduce-scatter, and low-precision traffic with fp32 sums. On NCCL fp32
uses its reduce-scatter, whose bits do not depend on the size for N = 2; lower precisions use the exchange as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from zerotune.engine import LedgerKeeper, RankGroup
from zerotune.engine.ledger import PendingCollective
from zerotune.records import CollectiveKind


class Work:
    """A collective under way. :meth:`wait` makes its result visible to what the current stream runs next."""

    def __init__(self, wait: Callable[[], None], ledger: LedgerKeeper, pending: PendingCollective) -> None:
        self._wait: Callable[[], None] | None = wait
        self._ledger = ledger
        self._pending = pending

    def wait(self) -> None:
        """Wait once; later calls return at once."""
        if self._wait is None:
            return
        self._ledger.begin_wait(self._pending)
        self._wait()
        self._wait = None
        self._ledger.end_wait(self._pending)


class Communicator:
    """Issues collectives and logs them.

    Args:
        group: The ranks.
        ledger: Where every collective is logged.
        overlap: Whether collectives run beside compute; otherwise each is waited for when it is issued.
    """

    def __init__(self, group: RankGroup, ledger: LedgerKeeper, overlap: bool) -> None:
        self._group = group
        self._ledger = ledger
        self._overlap = overlap
        self._streams: dict[str, torch.cuda.Stream] = {}
        if group.device.type == "cuda" and overlap:
            self._streams = {
                "gather": torch.cuda.Stream(group.device, priority=-1),
                "reduce": torch.cuda.Stream(group.device, priority=-1),
            }

    def all_gather(
        self, output: torch.Tensor, shard: torch.Tensor, purpose: str, units: Sequence[str]
    ) -> Work:
        """Assemble every rank's shard.

        Args:
            output: Receives rank r's shard at ``[r * n, (r + 1) * n)``  # 1D
            shard: This rank's n elements  # 1D
            purpose: For the ledger.
            units: For the ledger.
        """
        pending = self._log(CollectiveKind.ALL_GATHER, purpose, units, output)
        if self._group.size == 1:
            output.copy_(shard)
            return self._started(lambda: None, pending)

        def issue() -> dist.Work | None:
            return dist.all_gather_single(
                output, shard, group=self._group.process_group, async_op=self._is_async
            )

        return self._start("gather", issue, pending)

    def exchange(self, output: torch.Tensor, rows: torch.Tensor, purpose: str, units: Sequence[str]) -> Work:
        """Send row r to rank r: afterwards ``output`` holds row ``rank`` of every rank, in rank order.

        Args:
            output: N rows  # 1D
            rows: N rows  # 1D
            purpose: For the ledger.
            units: For the ledger.
        """
        pending = self._log(CollectiveKind.REDUCE_SCATTER, purpose, units, rows)
        if self._group.size == 1:
            output.copy_(rows)
            return self._started(lambda: None, pending)

        def issue() -> dist.Work | None:
            return dist.all_to_all_single(
                output, rows, group=self._group.process_group, async_op=self._is_async
            )

        return self._start("reduce", issue, pending)

    def reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, purpose: str, units: Sequence[str]
    ) -> Work:
        """Sum row ``rank`` over all ranks with the backend's own collective.

        Args:
            output: One row  # 1D
            rows: N rows  # 1D
            purpose: For the ledger.
            units: For the ledger.
        """
        pending = self._log(CollectiveKind.REDUCE_SCATTER, purpose, units, rows)

        def issue() -> dist.Work | None:
            return dist.reduce_scatter_single(
                output, rows, group=self._group.process_group, async_op=self._is_async
            )

        return self._start("reduce", issue, pending)

    def broadcast(self, tensor: torch.Tensor, purpose: str) -> None:
        """Overwrite a tensor with rank 0's; only at set-up."""
        if self._group.size == 1:
            return
        pending = self._ledger.issue(
            CollectiveKind.BROADCAST, purpose, (), tensor.numel(), tensor.numel(), tensor.element_size()
        )
        dist.broadcast(tensor, src=0, group=self._group.process_group)
        self._ledger.begin_wait(pending)
        self._ledger.end_wait(pending)

    @property
    def sums_in_exchange(self) -> Callable[[torch.dtype], bool]:
        """Whether a dtype is reduced by an exchange and a local sum (see [Note: order of summation])."""
        return lambda dtype: self._group.backend != "nccl" or dtype is not torch.float32

    @property
    def _is_async(self) -> bool:
        # On CUDA the side streams already give the overlap; a synchronous call orders the op after the side stream.
        return self._group.device.type != "cuda"

    def _log(
        self, kind: CollectiveKind, purpose: str, units: Sequence[str], full: torch.Tensor
    ) -> PendingCollective:
        n = self._group.size
        sent = full.numel() // n * (n - 1)
        return self._ledger.issue(kind, purpose, units, full.numel(), sent, full.element_size())

    def _start(self, stream: str, issue: Callable[[], dist.Work | None], pending: PendingCollective) -> Work:
        if self._group.device.type != "cuda":
            work = issue()
            assert work is not None
            return self._started(work.wait, pending)
        side = self._streams.get(stream)
        if side is None:
            issue()
            return self._started(lambda: None, pending)
        current = torch.cuda.current_stream(self._group.device)
        side.wait_stream(current)
        context: AbstractContextManager[object] = (
            torch.cuda.stream(side) if side is not None else nullcontext()
        )
        with context:
            issue()
            event = side.record_event()
        device = self._group.device
        return self._started(lambda: torch.cuda.current_stream(device).wait_event(event), pending)

    def _started(self, wait: Callable[[], object], pending: PendingCollective) -> Work:
        work = Work(lambda: (wait(), None)[1], self._ledger, pending)
        if not self._overlap:
            work.wait()
        return work

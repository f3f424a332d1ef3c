"""Collectives of the ZeRO engine. What differs between gloo on CPU and NCCL on CUDA is here and,
for what goes between ranks on CPU without either, in :mod:`zerotune.zero.direct`.

[Note: streams]
On CUDA, gathers and reductions run on a stream of their own each. A collective first makes its stream wait for the
current one, so that inputs are written and earlier readers of the output buffer are done; waiting for it makes the
current stream wait for its event. Buffers are allocated, read and given back on the current stream only, between
these two points, so no ``record_stream`` is needed and nothing waits on the host.

[Note: order of summation]
On gloo every reduction is an exchange followed by a local sum in rank order, in fp32: the same bits for
every bucket size, half the time of gloo's own reduce-scatter, and low-precision traffic with fp32 sums. On NCCL fp32
uses its reduce-scatter, whose bits do not depend on the size for N = 2; lower precisions use the exchange as well.

[Note: announcing]
Every collective is announced to the guard before it is issued and compared again when it has been waited for (see
:mod:`zerotune.engine.guard`). On CPU the ends of every row are matched by what was announced (:mod:`zerotune.zero.direct`). On
NCCL, gathers between nodes carry a tag at the head of every row: ``head_elements`` of them, which are not parameters and
are counted apart from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from zerotune.engine import LedgerKeeper, RankGroup
from zerotune.engine.guard import TAG_ELEMENTS, Waitable, install_guard, waited_on_host
from zerotune.engine.ledger import PendingCollective
from zerotune.records import CollectiveKind
from zerotune.zero.direct import Direct, Landing, direct_between, timeout_of, unprofiled
from zerotune.zero.flights import Place

_AS_IT_IS = nullcontext()


class Work:
    """A collective under way. :meth:`wait` makes its result visible to what the current stream runs next."""

    __slots__ = ("_comm", "_ledger", "_pending", "_wait")

    def __init__(self, wait: Callable[[], None], comm: Communicator, pending: PendingCollective) -> None:
        self._wait: Callable[[], None] | None = wait
        self._comm = comm
        self._ledger = comm.ledger
        self._pending = pending

    @property
    def left_out(self) -> float:
        """Share of this rank's bytes that need not be sent, for they are zeros."""
        return (
            self._pending.left_out_bytes / self._pending.sent_bytes if self._pending.left_out_bytes else 0.0
        )

    def wait(self) -> None:
        """Wait once; later calls return at once."""
        wait = self._wait
        if wait is None:
            return
        is_recording = self._ledger.is_recording
        if is_recording:
            self._ledger.begin_wait(self._pending)
        wait()
        self._wait = None
        if is_recording:
            self._ledger.end_wait(self._pending)

    def settle(self) -> bool:
        """Wait if there is anything to wait for, where the result is not needed.

        Returns:
            Whether its buffers may be used again; not if ranks diverged, for then something may still be written.
        """
        if self._comm.is_broken:
            return False
        self.wait()
        return True


class Communicator:
    """Issues collectives and logs them. A rank that is alone has none.

    Args:
        group: The ranks.
        ledger: Where every collective is logged.
        overlap: Whether collectives run beside compute; otherwise each is waited for when it is issued.
        timeout_s: How long to wait for one collective; ``None`` leaves it to the group's own time-out.

    Attributes:
        overlaps: As ``overlap``; it may be set between two collectives.
        ledger: As given.
    """

    def __init__(
        self, group: RankGroup, ledger: LedgerKeeper, overlap: bool, timeout_s: float | None = None
    ) -> None:
        self._group = group
        self.ledger = ledger
        self.overlaps = overlap
        self._guard = install_guard(group.process_group, group.rank, group.size)
        if self._guard is not None and timeout_s is not None:
            self._guard.limit_s = timeout_s
        self._direct: Direct | None = None
        if self._guard is not None and group.backend == "gloo" and group.device.type == "cpu":
            assert group.process_group is not None
            self._direct = direct_between(group.process_group, group.rank, group.size)
            if self._guard.limit_s is None:  # as for a collective of gloo's
                self._guard.limit_s = timeout_of(group.process_group)
        self._tags_differ: torch.Tensor | None = None
        self._streams: dict[str, torch.cuda.Stream] = {}
        if group.device.type == "cuda" and overlap:
            self._streams = {
                "gather": torch.cuda.Stream(group.device, priority=-1),
                "reduce": torch.cuda.Stream(group.device, priority=-1),
            }

    @property
    def head_elements(self) -> int:
        """Elements at the head of every row of a gather in which a tag travels; 0 within one node."""
        has_tags = self._guard is not None and self._guard.spans_nodes and self._direct is None
        return TAG_ELEMENTS if has_tags else 0

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self._group.rank

    @property
    def rows_received(self) -> int:
        """Rows that gathers and exchanges put into their output: of all ranks, or of all others where a rank sends itself
        nothing (gloo)."""
        return self._group.size - (self._direct is not None)

    @property
    def carries_pieces(self) -> bool:
        """Whether :meth:`exchange_pieces` does."""
        return self._direct is not None and self._direct.carries_pieces

    def own_row(self, own: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
        """This rank's row, where gathers and exchanges do not bring it, and whose it is.

        Args:
            own: What this rank sends  # [W]

        Returns:
            The row, of which rank, and the one after  # [(W, first, end)]; empty where they bring it
        """
        rank = self._group.rank
        return [] if self.rows_received == self._group.size else [(own, rank, rank + 1)]

    def rows_of_others(self, received: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
        """What gathers and exchanges bring: rows, and of which ranks they are, in rank order.

        Args:
            received: Their output  # [R * W]

        Returns:
            Rows, the first rank they are of, and the one after the last; a single row as it is, without a view of it
            # [(K, W) or (W), first, end]
        """
        rank, size = self._group.rank, self._group.size
        if self.rows_received == 1:
            return [(received, 1 - rank, 2 - rank)]
        rows = received.view(self.rows_received, received.numel() // self.rows_received)
        if self.rows_received == size:
            return [(rows, 0, size)]
        if rank == 0:
            return [(rows, 1, size)]
        if rank == size - 1:
            return [(rows, 0, rank)]
        return [(rows[:rank], 0, rank), (rows[rank:], rank + 1, size)]

    def rows_in_order(self, received: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's row, in rank order, after a gather or an exchange.

        Args:
            received: Its output  # [R * W]
            own: This rank's row  # [W]

        Returns:
            N of [W].
        """
        count = self.rows_received
        rows = [received] if count == 1 else list(received.view(count, received.numel() // count).unbind())
        if count < self._group.size:
            rows.insert(self._group.rank, own)
        return rows

    @property
    def is_broken(self) -> bool:
        """Whether ranks diverged: nothing in flight will land, and nothing can be issued."""
        return self._guard is not None and self._guard.failure is not None

    def check_tags(self) -> None:
        """Raise if tags that were compared on the device differed; waits for the device.

        Raises:
            RanksDiverged: They did.
        """
        differ, self._tags_differ = self._tags_differ, None
        if differ is not None and bool(differ):
            assert self._guard is not None
            self._guard.fail_by_tag()

    def all_gather(
        self,
        output: torch.Tensor,
        shard: torch.Tensor,
        purpose: str,
        units: Sequence[str],
        head: int = 0,
    ) -> Work:
        """Assemble every rank's shard.

        Args:
            output: Receives :attr:`rows_received` shards of n elements, in rank order  # 1D
            shard: This rank's n elements  # 1D
            purpose: For the ledger.
            units: For the ledger.
            head: How many of the n, at the beginning, are room for a tag: ``head_elements``, or 0 for none.
        """
        elements = shard.numel() * self._group.size
        pending, number = self._log(CollectiveKind.ALL_GATHER, purpose, units, elements, shard.itemsize, head)
        if head:
            assert self._guard is not None
            self._guard.stamp(shard, number)

        def issue() -> Waitable | None:
            if self._direct is not None:
                return self._direct.all_gather(output, shard, self._key(number))
            return dist.all_gather_single(
                output, shard, group=self._group.process_group, async_op=self._is_async
            )

        heads = output.view(self._group.size, -1)[:, :head] if head else None
        return self._start("gather", issue, pending, number, heads)

    def exchange(self, output: torch.Tensor, rows: torch.Tensor, purpose: str, units: Sequence[str]) -> Work:
        """Send row r to rank r: afterwards ``output`` holds row ``rank`` of the ranks, in rank order.

        Args:
            output: :attr:`rows_received` rows  # 1D
            rows: N rows  # 1D
            purpose: For the ledger.
            units: For the ledger.
        """
        pending, number = self._log(
            CollectiveKind.REDUCE_SCATTER, purpose, units, rows.numel(), rows.itemsize
        )

        def issue() -> Waitable | None:
            if self._direct is not None:
                return self._direct.exchange(output, rows, self._key(number))
            return dist.all_to_all_single(
                output, rows, group=self._group.process_group, async_op=self._is_async
            )

        return self._start("reduce", issue, pending, number)

    def exchange_pieces(
        self,
        sources: Mapping[int, Sequence[Place]],
        places: Mapping[int, Sequence[Place]],
        keep: tuple[torch.Tensor, ...],
        elements: int,
        purpose: str,
        units: Sequence[str],
    ) -> Work:
        """As :meth:`exchange`, of rows that are wherever they are; only where it :attr:`carries_pieces`.

        Args:
            sources: For every other rank, where what it gets is.
            places: For every other rank, where what it sends goes; of as many bytes.
            keep: The tensors of one dtype that these are in.
            elements: Of all ranks' rows, N * W.
            purpose: For the ledger.
            units: For the ledger.
        """
        pending, number = self._log(CollectiveKind.REDUCE_SCATTER, purpose, units, elements, keep[0].itemsize)
        direct = self._direct
        assert direct is not None
        return self._start(
            "reduce",
            lambda: direct.exchange_pieces(sources, places, keep, self._key(number)),
            pending,
            number,
        )

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
        pending, number = self._log(
            CollectiveKind.REDUCE_SCATTER, purpose, units, rows.numel(), rows.itemsize
        )

        def issue() -> Waitable | None:
            return dist.reduce_scatter_single(
                output, rows, group=self._group.process_group, async_op=self._is_async
            )

        return self._start("reduce", issue, pending, number)

    def broadcast(self, tensor: torch.Tensor, purpose: str) -> None:
        """Overwrite a tensor with rank 0's; only at set-up."""
        if self._group.size == 1:
            return
        number = self._announce(CollectiveKind.BROADCAST, purpose, (), tensor.numel())
        pending = self.ledger.issue(
            CollectiveKind.BROADCAST, purpose, (), tensor.numel(), tensor.numel(), tensor.element_size()
        )
        work = dist.broadcast(tensor, src=0, group=self._group.process_group, async_op=True)
        assert work is not None
        self.ledger.begin_wait(pending)
        self._wait_for(waited_on_host(work, self._group.device), number)
        if self.ledger.is_recording:
            self.ledger.end_wait(pending)

    def sums_in_exchange(self, dtype: torch.dtype) -> bool:
        """Whether a dtype is reduced by an exchange and a local sum (see [Note: order of summation])."""
        return self._group.backend != "nccl" or dtype is not torch.float32

    def _key(self, number: int) -> int:
        """What sends and receives of a collective are matched by."""
        assert self._guard is not None
        return self._guard.key(number)

    @property
    def _is_async(self) -> bool:
        # On CUDA the side streams already give the overlap; a synchronous call orders the op after the side stream.
        return self._group.device.type != "cuda"

    def _log(
        self,
        kind: CollectiveKind,
        purpose: str,
        units: Sequence[str],
        elements: int,
        size: int,
        head: int = 0,
    ) -> tuple[PendingCollective, int]:
        """Announce and log a collective of so many elements of so many bytes; returns its ledger entry and its number."""
        n = self._group.size
        tags = head * n
        elements -= tags
        number = self._announce(kind, purpose, units, elements)
        pending = self.ledger.issue(kind, purpose, units, elements, elements // n * (n - 1), size)
        if tags:
            pending.tag_bytes = head * (n - 1) * size
        return pending, number

    def _announce(self, kind: CollectiveKind, purpose: str, units: Sequence[str], elements: int) -> int:
        return 0 if self._guard is None else self._guard.enter(kind, purpose, units, elements)

    def _wait_for(self, work: Waitable, number: int) -> None:
        if self._guard is not None:
            self._guard.wait(work, number)
        else:
            assert isinstance(work, dist.Work)
            work.wait()

    def _start(
        self,
        stream: str,
        issue: Callable[[], Waitable | None],
        pending: PendingCollective,
        number: int,
        heads: torch.Tensor | None = None,
    ) -> Work:
        if self._group.device.type != "cuda":
            with unprofiled() if self._direct is None else _AS_IT_IS:
                work = issue()
            assert work is not None
            if isinstance(work, Landing):
                pending.left_out_bytes = work.left_out_bytes
            return self._started(lambda: self._wait_for(work, number), pending)
        side = self._streams.get(stream)
        if side is None:
            issue()
            return self._started(lambda: self._compare_on_device(heads, number), pending)
        side.wait_stream(torch.cuda.current_stream(self._group.device))
        with torch.cuda.stream(side):
            issue()
            event = side.record_event()
        device = self._group.device

        def wait_on_stream() -> None:
            torch.cuda.current_stream(device).wait_event(event)
            self._compare_on_device(heads, number)

        return self._started(wait_on_stream, pending)

    def _compare_on_device(self, heads: torch.Tensor | None, number: int) -> None:
        if heads is None or self._guard is None:
            return
        differ = self._guard.differing_tags(heads, number)
        self._tags_differ = differ if self._tags_differ is None else self._tags_differ | differ

    def _started(self, wait: Callable[[], None], pending: PendingCollective) -> Work:
        work = Work(wait, self, pending)
        if not self.overlaps:
            work.wait()
        return work

"""Gathers and exchanges on CPU as one row for and from every other rank: read by neighbours, over wires, or by gloo.

[Note: receives first]
gloo, which carries to ranks that nothing else reaches, moves data only once the receiver has said that it is ready, and
that word travels on the connection that the receiver's own data travels on. gloo's all-gather and all-to-all post what
they send before what they receive. Then the rank that comes second has put its data on the wire before the word the first
one waits for: on a slow link the two directions carry data one after the other instead of at once (measured at 500
Mbit/s: 140 ms instead of 70 for an exchange of 4.2 MB). Posting receives first lets both directions flow as soon as both
ranks are there.

What the two ends of a row have in common is a number that stands for the collective, of which units, for what, and how
large: ranks that diverge never match, so that nothing is mixed and nobody is ended by a message of another size; they
wait, and the guard finds out why.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from zerotune.engine.meeting import said_by_all
from zerotune.models.marks import is_profiled
from zerotune.zero.carrier import Carrier
from zerotune.zero.flights import Place
from zerotune.zero.neighbours import Neighbours
from zerotune.zero.wires import Wires

_EXIT_S = 3.0
"""How long a process that ends waits for what is in flight: the next step's first gathers, which all ranks have issued."""


class Landing:
    """A collective that comes in parts; for :meth:`zerotune.engine.guard.CollectiveGuard.wait`.

    Args:
        parts: How many: what neighbours read is one, what wires carry another, what gloo carries a third.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self.left_out_bytes = 0
        """Bytes of this rank's rows that need not be sent."""
        self._lock = threading.Lock()
        self.works: list[dist.Work] = []
        self.error: BaseException | None = None
        self._landed = threading.Lock()  # held until then: a third of what an Event costs
        self._landed.acquire()

    def part_landed(self, error: BaseException | None = None) -> None:
        """One of its parts is there, or failed."""
        with self._lock:
            self.error = self.error or error
            if self._parts > 0:
                self._parts = 0 if error is not None else self._parts - 1
                if not self._parts:
                    self._landed.release()

    def wait(self, timeout: timedelta) -> bool:
        """Wait until everything has arrived and nothing of ours is still being sent or read.

        Raises:
            RuntimeError: "Operation timed out", as gloo says it; or the connection broke.
        """
        if not self._landed.acquire(timeout=timeout.total_seconds()):
            raise RuntimeError("Operation timed out")
        self._landed.release()  # for whoever else waits
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        return True


class _Waiter:
    """A thread that waits for sends and receives in the order of issue.

    gloo cannot be asked whether one has ended, and closes every connection if waiting for one takes longer than was said.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Landing | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(self._queue,), name="landings", daemon=True)
        thread.start()
        # A thread that comes back from C++ while Python ends would end the process with SIGABRT.
        atexit.register(self._end_and_join, thread)

    def watch(self, landing: Landing) -> None:
        self._queue.put(landing)

    def end(self) -> None:
        """End the thread, once it has waited for everything."""
        self._queue.put(None)

    def _end_and_join(self, thread: threading.Thread) -> None:
        self.end()
        thread.join(_EXIT_S)

    @staticmethod
    def _run(landings: queue.SimpleQueue[Landing | None]) -> None:
        while (landing := landings.get()) is not None:
            failure: BaseException | None = None
            try:
                while landing.works:  # a work holds its buffer: let go of it before saying that it has landed
                    landing.works.pop(0).wait()
            except BaseException as error:
                failure = error
                landing.works.clear()
            landing.part_landed(failure)
            del landing, failure


@contextmanager
def unprofiled() -> Iterator[None]:
    """What begins inside is no event of torch's profiler: a collective of gloo that outlives the profiler tells it of its
    end when it is gone, which ends the process in C++ (torch 2.13)."""
    if not is_profiled():
        yield
        return
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


_DIRECT: WeakKeyDictionary[dist.ProcessGroup, Direct] = WeakKeyDictionary()


def timeout_of(group: dist.ProcessGroup) -> float:
    """How long a collective of a group may take, s."""
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit.total_seconds()


def direct_between(group: dist.ProcessGroup, rank: int, size: int) -> Direct:
    """How this rank reaches the others of a group; the first call is collective."""
    found = _DIRECT.get(group)
    if found is None:
        found = _DIRECT[group] = Direct(group, rank, size)
    return found


class Direct:
    """How this rank reaches the others of a group. Creating it is collective; see :func:`direct_between`.

    Args:
        group: The ranks; held weakly.
        rank: This one in it.
        size: Their number, N.

    Attributes:
        neighbours: Ranks of this host, and how they read from one another.
        wires: Ranks of other hosts, and the connections to them.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        store = _get_process_group_store(group)
        self._group = weakref.ref(group)
        self._rank = rank
        self._size = size
        self.neighbours = Neighbours(store, rank, size)
        self.wires = Wires(store, rank, size, self.neighbours.ranks)
        weakref.finalize(group, self.neighbours.end)
        weakref.finalize(group, self.wires.end)
        others = [
            r % size for r in range(rank + 1, rank + size)
        ]  # so that not all send to the same one first
        self._carriers: list[tuple[Carrier, list[int]]] = [
            (carrier, [r for r in others if r in carrier.ranks])
            for carrier in (self.neighbours, self.wires)
            if carrier.ranks
        ]
        self._by_gloo = [r for r in others if not any(r in ranks for _, ranks in self._carriers)]
        self._waiter: _Waiter | None = None
        self.carries_pieces = not any(said_by_all(store, "by_gloo", rank, size, bool(self._by_gloo)))
        """Whether rows may be in pieces, of which gloo knows nothing; the same on every rank."""

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, key: int) -> Landing:
        """Receive every other rank's shard.

        Args:
            output: Receives their shards in rank order  # [(N - 1) * W]
            shard: This rank's  # [W]
            key: 63 bits, the same for this collective on every rank, and of no other that is open.
        """
        return self._start(output, shard, 0, key)

    def exchange_pieces(
        self,
        sources: Mapping[int, Sequence[Place]],
        places: Mapping[int, Sequence[Place]],
        keep: tuple[torch.Tensor, ...],
        key: int,
    ) -> Landing:
        """Send rows to every other rank, receive one of each, from and to wherever they are; see :attr:`carries_pieces`.

        Args:
            sources: What each gets, piece by piece.
            places: Where each one's goes, piece by piece; of as many bytes.
            keep: The tensors that these are in.
            key: 63 bits, the same for this collective on every rank, and of no other that is open.
        """
        landing = Landing(len(self._carriers))
        self._carry(landing, sources, places, keep, key)
        return landing

    def _carry(
        self,
        landing: Landing,
        sources: Mapping[int, Sequence[Place]],
        places: Mapping[int, Sequence[Place]],
        keep: tuple[torch.Tensor, ...],
        key: int,
    ) -> None:
        """All that does not go by gloo; each carrier is a part of the landing."""
        for carrier, ranks in self._carriers:
            landing.left_out_bytes += carrier.exchange(
                key, {r: sources[r] for r in ranks}, {r: places[r] for r in ranks}, keep, landing.part_landed
            )

    def exchange(self, output: torch.Tensor, rows: torch.Tensor, key: int) -> Landing:
        """Send row r to every other rank r, receive row ``rank`` of theirs.

        Args:
            output: Receives their rows in rank order  # [(N - 1) * W]
            rows: What is sent; the own row stays where it is  # [N * W]
            key: 63 bits, the same for this collective on every rank, and of no other that is open.
        """
        return self._start(output, rows, rows.numel() // self._size, key)

    def _start(self, output: torch.Tensor, sent: torch.Tensor, stride: int, key: int) -> Landing:
        """Bring every rank its row, and one from each.

        Args:
            output: As above.
            sent: Where the rows are.
            stride: Elements from one rank's row to the next one's.
            key: As above.
        """
        width = output.numel() // (self._size - 1)
        landing = Landing(len(self._carriers) + bool(self._by_gloo))
        row, step = width * output.itemsize, stride * sent.itemsize
        source, place = sent.data_ptr(), output.data_ptr()
        carried = [r for _, ranks in self._carriers for r in ranks]
        sources = {r: [Place(source + r * step, row)] for r in carried}
        places = {r: [Place(place + (r - (r > self._rank)) * row, row)] for r in carried}
        self._carry(landing, sources, places, (output, sent), key)
        if self._by_gloo:
            self._start_gloo(landing, output.view(self._size - 1, width), sent, stride, key)
        return landing

    def _start_gloo(
        self, landing: Landing, places: torch.Tensor, sent: torch.Tensor, stride: int, key: int
    ) -> None:
        group = self._group()
        assert group is not None, "whoever calls holds it"
        if self._waiter is None:
            self._waiter = _Waiter()
            weakref.finalize(group, self._waiter.end)
        tag = key % (1 << 31)  # gloo takes no more; of two that are equal it serves the first first
        width = places.shape[1]
        rows = {r: sent[r * stride : r * stride + width] for r in self._by_gloo}
        with unprofiled():
            landing.works = [group.recv([places[r - (r > self._rank)]], r, tag) for r in rows]
            landing.works += [group.send([row], r, tag) for r, row in rows.items()]
        self._waiter.watch(landing)

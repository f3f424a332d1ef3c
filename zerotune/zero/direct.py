"""Gathers and exchanges on CPU as direct sends and receives, receives first; between neighbours without gloo.

[Note: receives first]
gloo moves data only once the receiver has said that it is ready, and that word travels on the connection that the
receiver's own data travels on. gloo's all-gather and all-to-all post what they send before what they receive. Then the
rank that comes second has put its data on the wire before the word the first one waits for: on a slow link the two
directions carry data one after the other instead of at once (measured at 500 Mbit/s: 140 ms instead of 70 for an
exchange of 4.2 MB). Posting receives first lets both directions flow as soon as both ranks are there.

What a send and a receive have in common is a number that stands for the collective, of which units, for what, and how
large: ranks that diverge never match, so that nothing is mixed and nobody is ended by a message of another size; they
wait, and the guard finds out why.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from zerotune.zero.neighbours import Neighbours, Place

_EXIT_S = 3.0
"""How long a process that ends waits for what is in flight: the next step's first gathers, which all ranks have issued."""


class Landing:
    """A collective that comes in parts; for :meth:`zerotune.engine.guard.CollectiveGuard.wait`.

    Args:
        parts: How many: what gloo carries is one, what neighbours read is another.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self.works: list[dist.Work] = []
        self.error: BaseException | None = None
        self.landed = threading.Event()

    def part_landed(self, error: BaseException | None = None) -> None:
        """One of its parts is there, or failed."""
        with self._lock:
            self.error = self.error or error
            self._parts -= 1
            is_over = self._parts == 0 or error is not None
        if is_over:
            self.landed.set()

    def wait(self, timeout: timedelta) -> bool:
        """Wait until everything has arrived and nothing of ours is still being sent or read.

        Raises:
            RuntimeError: "Operation timed out", as gloo says it; or the connection broke.
        """
        if not self.landed.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out")
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


_WAITERS: WeakKeyDictionary[dist.ProcessGroup, _Waiter] = WeakKeyDictionary()
_NEIGHBOURS: WeakKeyDictionary[dist.ProcessGroup, Neighbours] = WeakKeyDictionary()


def timeout_of(group: dist.ProcessGroup) -> float:
    """How long a collective of a group may take, s."""
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit.total_seconds()


def meet_neighbours(group: dist.ProcessGroup, rank: int, size: int) -> Neighbours:
    """This rank's neighbours in a group; the first call is collective."""
    found = _NEIGHBOURS.get(group)
    if found is None:
        found = _NEIGHBOURS[group] = Neighbours(_get_process_group_store(group), rank, size)
        weakref.finalize(group, found.end)
    return found


def all_gather(
    group: dist.ProcessGroup, rank: int, size: int, output: torch.Tensor, shard: torch.Tensor, key: int
) -> Landing:
    """Receive every other rank's shard.

    Args:
        group: The ranks.
        rank: This one in it.
        size: Their number, N.
        output: Receives their shards in rank order  # [(N - 1) * W]
        shard: This rank's  # [W]
        key: 63 bits, the same for this collective on every rank, and of no other that is open.
    """
    rows = output.view(size - 1, output.numel() // (size - 1))
    others = _others(rank, size)
    return _start(
        group,
        dict.fromkeys(others, shard),
        {r: rows[r - (r > rank)] for r in others},
        meet_neighbours(group, rank, size),
        key,
        (output, shard),
    )


def exchange(
    group: dist.ProcessGroup, rank: int, size: int, output: torch.Tensor, rows: torch.Tensor, key: int
) -> Landing:
    """Send row r to every other rank r, receive row ``rank`` of theirs.

    Args:
        group: The ranks.
        rank: This one in it.
        size: Their number, N.
        output: Receives their rows in rank order  # [(N - 1) * W]
        rows: What is sent; the own row stays where it is  # [N * W]
        key: 63 bits, the same for this collective on every rank, and of no other that is open.
    """
    received = output.view(size - 1, output.numel() // (size - 1))
    sent = rows.view(size, rows.numel() // size)
    others = _others(rank, size)
    return _start(
        group,
        {r: sent[r] for r in others},
        {r: received[r - (r > rank)] for r in others},
        meet_neighbours(group, rank, size),
        key,
        (output, rows),
    )


def _start(
    group: dist.ProcessGroup,
    sources: dict[int, torch.Tensor],
    places: dict[int, torch.Tensor],
    neighbours: Neighbours,
    key: int,
    keep: tuple[torch.Tensor, ...],
) -> Landing:
    """Bring every rank its row, and one from each.

    Args:
        group: The ranks.
        sources: What is for whom  # [W] each
        places: Where each one's goes  # [W] each
        neighbours: Those among them that read from each other.
        key: As above.
        keep: What all this is in.
    """
    near = [r for r in sources if r in neighbours.ranks]
    far = [r for r in sources if r not in neighbours.ranks]
    landing = Landing(bool(near) + bool(far))
    if far:
        tag = key % (1 << 31)  # gloo takes no more; of two that are equal it serves the first first
        landing.works = [group.recv([places[r]], r, tag) for r in far]
        landing.works += [group.send([sources[r]], r, tag) for r in far]
        _waiter(group).watch(landing)
    if near:
        neighbours.exchange(
            key,
            {r: sources[r].data_ptr() for r in near},
            {r: Place(places[r].data_ptr(), places[r].nbytes) for r in near},
            keep,
            landing.part_landed,
        )
    return landing


def _others(rank: int, size: int) -> list[int]:
    """The next rank first, so that not all send to the same one."""
    return [r % size for r in range(rank + 1, rank + size)]


def _waiter(group: dist.ProcessGroup) -> _Waiter:
    waiter = _WAITERS.get(group)
    if waiter is None:
        waiter = _WAITERS[group] = _Waiter()
        weakref.finalize(group, waiter.end)
    return waiter

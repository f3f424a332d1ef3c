"""Ranks that disagree end in seconds, and say where.

Before a collective is issued, its rank announces it in its slots (see [Note: slots] in :mod:`zerotune.engine.slots`) and
compares with what the other ranks of its node announced under the same number. Whoever comes second finds that they
differ before its collective can do harm: gloo's own gathers of unequal size end the other process in C++, and those of
equal size mix silently. Whoever came first waits, and looks at the slots while it waits.

Ranks of other nodes are told through the process group's store, and only when something has gone on for long or has
gone wrong. On CPU the two ends of every row are matched by what was announced (:meth:`CollectiveGuard.key`), and
what NCCL gathers carries a tag (:meth:`CollectiveGuard.stamp`) that is compared on the device.

A slow rank is not a diverged one: the error is raised when slots prove that ranks ran different collectives under one
number, when a connection is lost, or when the time limit has passed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from zerotune.config.errors import RunFailed
from zerotune.engine import slots
from zerotune.engine.slots import Entry, SlotFile, word_of
from zerotune.records import CollectiveKind

POLL_S = 0.1
"""How often a rank that waits looks at the slots of its node."""

STORE_POLL_S = 1.0
"""How long it waits before it tells the other nodes, and how often it asks them."""

STORE_ANSWER_S = 3.0
"""How long the store may take to answer, once something is wrong."""

TAG_ELEMENTS = 16
"""Elements of the tag at the head of a row that travels between nodes: two 64-bit words in any dtype, and padding."""

_VERBS = {
    CollectiveKind.ALL_GATHER: "gathers",
    CollectiveKind.REDUCE_SCATTER: "reduces",
    CollectiveKind.ALL_REDUCE: "sums",
    CollectiveKind.BROADCAST: "broadcasts",
}
_DEVICE_POLL_S = 50e-6
_PUBLISHED = 64  # latest entries told to other nodes
_REMEDY = "run the same modules on every rank, or make the module that chooses between them one unit: train.leaf_modules"


class CollectiveFailed(RunFailed):
    """A collective did not come about.

    Attributes:
        doing: What each rank was doing last, by rank, as far as it is known.
    """

    def __init__(self, message: str, remedy: str | None = None, doing: dict[int, str] | None = None) -> None:
        super().__init__(message, remedy)
        self.doing = doing or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.remedy, self.doing)


class RanksDiverged(CollectiveFailed):
    """Ranks ran different collectives under one number."""


class Waitable(Protocol):
    """What :meth:`CollectiveGuard.wait` takes: a ``dist.Work``, or a CUDA event in its clothes."""

    def wait(self, timeout: timedelta) -> bool: ...


class DeviceWork:
    """A collective on a CUDA stream, for :meth:`CollectiveGuard.wait`.

    The host asks an event: a time-out given to NCCL's own wait aborts the communicator when it has passed.

    Args:
        work: What was issued; the current stream waits for it.
        device: Whose current stream.
    """

    def __init__(self, work: dist.Work, device: torch.device) -> None:
        work.wait()
        self._landed = torch.cuda.current_stream(device).record_event()

    def wait(self, timeout: timedelta) -> bool:
        """Wait on the host.

        Raises:
            RuntimeError: "Operation timed out", as gloo says it.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._landed.query():
            if time.monotonic() > deadline:
                raise RuntimeError("Operation timed out")
            time.sleep(_DEVICE_POLL_S)
        return True


def waited_on_host(work: dist.Work, device: torch.device) -> Waitable:
    """A collective of torch's as :meth:`CollectiveGuard.wait` takes it: on CUDA an event stands for it."""
    return DeviceWork(work, device) if device.type == "cuda" else work


class CollectiveGuard:
    """Watches over the collectives of one process group. Creating it is collective; see :func:`guard_of`.

    Args:
        process_group: The group.
        rank: This rank in it.
        size: Its ranks.
        limit_s: How long to wait for one collective at most; ``None`` leaves it to the group's own time-out.

    Attributes:
        failure: What went wrong; once set, the group cannot be used any more and every call raises it again.
        spans_nodes: Whether some rank's slots cannot be read from here.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, rank: int, size: int, limit_s: float | None = None
    ) -> None:
        self._process_group = process_group
        self._store = _get_process_group_store(process_group)
        self._rank = rank
        self._size = size
        self.limit_s = limit_s
        self.failure: CollectiveFailed | None = None
        self._number = 0
        self._known: dict[tuple[CollectiveKind, str, tuple[str, ...], int], tuple[int, bytes]] = {}
        self._remote: dict[int, dict[int, Entry]] = {}
        self._told = (-1, -1)
        self._open_slots()

    def _open_slots(self) -> None:
        path = slots.new_slot_path()
        slots.sweep(path.parent)
        self._own = SlotFile(path, create=True)
        atexit.register(slots.unlink, [str(path)])
        self._store.set(f"slots/{self._rank}", json.dumps([slots.this_node(), str(path)]))
        places = [json.loads(self._store.get(f"slots/{rank}")) for rank in range(self._size)]
        here = [r for r, (node, _) in enumerate(places) if node == places[self._rank][0]]
        self._files = {self._rank: self._own}
        for rank in here:
            if rank != self._rank:
                with contextlib.suppress(OSError):
                    self._files[rank] = SlotFile(places[rank][1])
        self._peers = [(rank, file.words) for rank, file in self._files.items() if rank != self._rank]
        self.spans_nodes = len(self._files) < self._size
        if len(self._files) == len(here) and self._store.add(f"slots/opened/{here[0]}", 1) == len(here):
            slots.unlink(places[rank][1] for rank in here)

    # --------------------------------------------------------------------------------------------- every collective

    def enter(self, kind: CollectiveKind, purpose: str, units: Sequence[str], elements: int) -> int:
        """Announce a collective that is about to be issued.

        Args:
            kind: Which.
            purpose: What for.
            units: Names of what it carries.
            elements: Elements of the full tensor.

        Returns:
            Its number, for :meth:`wait`.

        Raises:
            RanksDiverged: Another rank announced another collective under this number.
        """
        if self.failure is not None:
            raise self._again()
        key = (kind, purpose, tuple(units), elements)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _describe(*key)
        self._number = number = self._number + 1
        self._own.write(number, known[0], known[1])
        self._compare(number, known[0])
        return number

    def key(self, number: int) -> int:
        """63 bits that stand for a collective: its number, what it is, of which units, for what, how large."""
        digest = self._own.digest(number)
        assert digest is not None, "it has been announced"
        return (digest ^ number * 0x9E3779B97F4A7C15) % (1 << 63)

    def wait(self, work: Waitable, number: int) -> None:
        """Wait for a collective, and watch the other ranks meanwhile.

        Raises:
            RanksDiverged: Another rank ran another collective under this number.
            CollectiveFailed: A rank is gone, or it took too long.
        """
        if self.failure is not None:
            raise self._again()
        self._own.mark_wait(number)
        try:
            work.wait(_POLL)
        except RuntimeError as error:
            self._keep_waiting(work, number, error)
        self._own.mark_wait(0)
        digest = self._own.digest(number)
        if digest is not None:
            self._compare(number, digest)

    def _compare(self, number: int, digest: int) -> None:
        word = word_of(number)
        for _, words in self._peers:
            if words[word] == number and words[word + 1] != digest:
                time.sleep(0.001)  # it may have been read half written
                if words[word] == number and words[word + 1] != digest:
                    self._fail(self._divergence(number))

    # ------------------------------------------------------------------------------------------ tags between nodes

    def stamp(self, row: torch.Tensor, number: int) -> None:
        """Write the tag of a collective at the head of a row  # 1D"""
        tag = torch.tensor([number, self._own.digest(number)])
        row[:TAG_ELEMENTS].view(torch.int64)[:2].copy_(tag, non_blocking=True)

    def differing_tags(self, heads: torch.Tensor, number: int) -> torch.Tensor:
        """The same comparison left on the device: whether any tag differs  # scalar"""
        mine = torch.tensor([number, self._own.digest(number)]).to(heads.device, non_blocking=True)
        return (_tags(heads) != mine).any()

    def fail_by_tag(self) -> NoReturn:
        """Some tag that was compared on the device differed.

        Raises:
            RanksDiverged: Always.
        """
        self._ask_other_nodes()
        self._fail(self._divergence(self._number))

    # -------------------------------------------------------------------------------------------- when it takes long

    def _keep_waiting(self, work: Waitable, number: int, error: RuntimeError) -> None:
        began = asked = time.monotonic()
        while True:
            if "Operation timed out" not in str(error):
                self._lost(number, error)
            self._look()
            now = time.monotonic()
            if self.spans_nodes and now - asked > STORE_POLL_S:
                asked = now
                self._ask_other_nodes()
                self._look()
            if self.limit_s is not None and now - began > self.limit_s:
                self._ask_other_nodes()
                self._look()
                self._fail(self._failed(f"timed out waiting {self.limit_s:g} s for a collective"))
            try:
                work.wait(_POLL)
                return
            except RuntimeError as again:
                error = again

    def _lost(self, number: int, error: RuntimeError) -> NoReturn:
        """The connection broke: because ranks diverged, or for another reason."""
        deadline = time.monotonic() + 0.5
        self._ask_other_nodes()
        while True:
            self._look()
            gone = [r for r, file in self._files.items() if not slots.is_alive(file.pid)]
            if gone or time.monotonic() > deadline:
                break
            time.sleep(0.05)  # a process that is ending is still there for a moment
        self._ask_other_nodes()
        self._look()
        who = f"rank {', '.join(map(str, gone))} ended" if gone else "a rank is gone"
        line = next(iter(str(error).splitlines()), "").split(". This is")[0]
        self._fail(self._failed(f"{who} during a collective ({line})"))

    def _look(self) -> None:
        """Raise if what is known of the other ranks proves that they diverged."""
        number = self._first_difference()
        if number is not None:
            time.sleep(0.001)
            if self._first_difference() == number:
                self._fail(self._divergence(number))

    def _first_difference(self) -> int | None:
        latest = self._number
        oldest = max(1, latest - slots.ENTRIES + 1)
        own = {n: d for n in range(oldest, latest + 1) if (d := self._own.digest(n)) is not None}
        found: list[int] = []
        for rank, file in self._files.items():
            if rank != self._rank:
                found += [n for n, d in own.items() if (other := file.digest(n)) is not None and other != d]
        for entries in self._remote.values():
            found += [n for n, entry in entries.items() if n in own and own[n] != entry.digest]
        return min(found, default=None)

    # ------------------------------------------------------------------------------------------------- other nodes

    def _ask_other_nodes(self) -> None:
        """Tell what this rank did, and read what ranks of other nodes told; within a bounded time."""
        if not self.spans_nodes:
            return

        def ask() -> None:
            with contextlib.suppress(Exception):
                told = [(e.number, e.digest, e.text, e.time_s) for e in self._own.entries(_PUBLISHED)]
                self._store.set(f"slots/told/{self._rank}", json.dumps(told))
                for rank in range(self._size):
                    key = f"slots/told/{rank}"
                    if rank not in self._files and self._store.check([key]):
                        entries = [Entry(*fields) for fields in json.loads(self._store.get(key))]
                        self._remote.setdefault(rank, {}).update({e.number: e for e in entries})

        asking = threading.Thread(target=ask, name="slots", daemon=True)
        asking.start()
        asking.join(STORE_ANSWER_S)

    # ------------------------------------------------------------------------------------------------- in words

    def doing(self) -> dict[int, str]:
        """What each rank was doing last, as far as it can be known from here."""
        found: dict[int, str] = {}
        for rank in range(self._size):
            entry = self._latest(rank)
            if entry is not None:
                file = self._files.get(rank)
                waits = file is not None and file.waits_for == entry.number
                found[rank] = (
                    f"{entry.text} as collective {entry.number}{', waiting for it' if waits else ''}"
                )
        return found

    def _latest(self, rank: int) -> Entry | None:
        file = self._files.get(rank)
        if file is not None:
            return file.entry(file.latest)
        entries = self._remote.get(rank)
        return entries[max(entries)] if entries else None

    def _at(self, rank: int, number: int) -> Entry | None:
        file = self._files.get(rank)
        return file.entry(number) if file is not None else self._remote.get(rank, {}).get(number)

    def _divergence(self, number: int) -> RanksDiverged:
        # The others are about to say what they do: give them a moment, so that every rank can be named.
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline and any(f.latest < number for f in self._files.values()):
            time.sleep(0.01)
        lines: dict[int, str] = {}
        for rank in range(self._size):
            entry = self._at(rank, number)
            latest = self._latest(rank)
            if entry is not None:
                lines[rank] = f"{entry.text} as collective {number}"
            elif latest is not None:
                lines[rank] = f"came to collective {latest.number} only: {latest.text}"
            else:
                lines[rank] = "did not say what it does"
        return RanksDiverged(f"{_by_rank(lines)}: the ranks ran different modules", _REMEDY, self.doing())

    def _failed(self, what: str) -> CollectiveFailed:
        doing = self.doing()
        told = {rank: doing.get(rank, "did not say what it does") for rank in range(self._size)}
        return CollectiveFailed(f"{what}; the last of each: {_by_rank(told)}", doing=doing)

    def _fail(self, failure: CollectiveFailed) -> NoReturn:
        if self.failure is None:
            self.failure = failure
            self._ask_other_nodes()
            _never_wait_for(self._process_group)
        raise failure

    def _again(self) -> CollectiveFailed:
        assert self.failure is not None
        return type(self.failure)(self.failure.message, self.failure.remedy, self.failure.doing)


_POLL = timedelta(seconds=POLL_S)
_GUARDS: WeakKeyDictionary[dist.ProcessGroup, CollectiveGuard] = WeakKeyDictionary()


def guard_of(process_group: dist.ProcessGroup | None) -> CollectiveGuard | None:
    """The guard of a process group, if :func:`install_guard` has made one."""
    return None if process_group is None else _GUARDS.get(process_group)


def install_guard(process_group: dist.ProcessGroup | None, rank: int, size: int) -> CollectiveGuard | None:
    """The guard of a process group, made at the first call, which is collective.

    Returns:
        ``None`` for a single rank, and for torch's fake process group.
    """
    if process_group is None or size == 1 or dist.get_backend(process_group) == "fake":
        return None
    guard = _GUARDS.get(process_group)
    if guard is None:
        guard = _GUARDS[process_group] = CollectiveGuard(process_group, rank, size)
    return guard


def _describe(kind: CollectiveKind, purpose: str, units: tuple[str, ...], elements: int) -> tuple[int, bytes]:
    shown = ", ".join(units[:2]) + (f" and {len(units) - 2} more" if len(units) > 2 else "")
    text = f"{_VERBS[kind]} {shown}{' ' if shown else ''}({purpose}, {elements} elements)"
    if len(text.encode()) > 100:
        text = f"{_VERBS[kind]} {units[0][-50:]} and {len(units) - 1} more ({purpose}, {elements} elements)"
    digest = hashlib.blake2b(repr((kind.value, purpose, units, elements)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little"), slots.slot_text(text)


def _tags(heads: torch.Tensor) -> torch.Tensor:
    return heads.contiguous().view(torch.int64)[:, :2]


def _by_rank(lines: dict[int, str]) -> str:
    """One clause per different text, with the ranks it holds for."""
    ranks: dict[str, list[int]] = {}
    for rank, line in lines.items():
        ranks.setdefault(line, []).append(rank)
    clauses = []
    for line, who in ranks.items():
        several = f"ranks {', '.join(map(str, who[:8]))}{' and others' if len(who) > 8 else ''}"
        clauses.append(f"{several if len(who) > 1 else f'rank {who[0]}'} {line}")
    return ", ".join(clauses)


def _never_wait_for(process_group: dist.ProcessGroup) -> None:
    """Keep a broken group from being destroyed: its destructor waits for collectives that will never come about, and the
    process would not end."""
    for leaked in (process_group, *_backends(process_group)):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))


def _backends(process_group: dist.ProcessGroup) -> list[object]:
    found: list[object] = []
    for device in ("cpu", "cuda"):
        with contextlib.suppress(Exception):
            found.append(process_group._get_backend(torch.device(device)))
    return found

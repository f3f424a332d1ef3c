"""Ranks of different hosts, over TCP connections of our own.

[Note: a wire]
Two ranks share one connection, on which the rows of collectives follow one another in the order of issue, which is the
same on all ranks. A row is sent as soon as there is one, as far as the kernel takes it; a thread sends the rest and puts
what comes in its place. A row that this rank has not come to stays in the kernel, and holds up what follows it. What is
mostly zeros goes without them (:mod:`zerotune.zero.zeros`).

gloo would carry them too. But its thread and the one that sends share a lock which it tries to take again and again
while the other holds it: on a rank with one core both share the core, and it does so for as long as its time slice lasts
(strace and perf at 2 Gbit/s: a third of its 65 ms in a step of 700). It also wakes for every 64 KiB that arrive, where
the kernel can be asked to wake nobody before half a megabyte is there, and waits for the receiver's word before it sends.

Ranks that do not reach one another so are left to gloo.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerotune.zero.carrier import LOOK_S, Carrier
from zerotune.zero.flights import Flight, Place, bytes_in
from zerotune.zero.wiring import connect
from zerotune.zero.zeros import MOST_HELD, Packed, may_pack, most_bytes, pack, unpack

_HEADER = struct.Struct("<QQ?")  # key, bytes that follow, whether they are a packed row
_WAKE_BYTES = 512 * 1024
"""Of a row, so many arrive before the thread is woken: small enough to be in the cache when they are copied."""


class _Row(NamedTuple):
    """A row on its way out."""

    key: int
    flight: Flight
    parts: list[memoryview]
    """What has not been sent of the header and the row."""


@dataclass(eq=False)
class _Wire:
    """The connection to one rank.

    What is sent is changed under ``lock``; what is received, by the thread alone. ``stalls_at`` is changed under the
    flights' lock, for whoever begins the collective that it names.
    """

    rank: int
    connection: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    outgoing: deque[_Row] = field(default_factory=deque)
    header: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    header_filled: int = 0
    key: int = 0
    """Of the row that is coming."""
    flight: Flight | None = None
    """Where it belongs, once this rank has come to it."""
    missing: list[memoryview] = field(default_factory=list)
    """What has not come of its place, piece by piece, or of what is packed."""
    packed: memoryview | None = None
    """Where a packed row is put together."""
    stalls_at: int | None = None
    """Key of a row whose header is here, which this rank has not come to."""
    wakes_at: int = 1
    """Bytes that must be there before the thread is woken."""
    is_sending: bool = False
    """Whether the thread waits until more can be sent."""
    is_gone: bool = False


def _bytes_at(places: Iterable[Place]) -> list[memoryview]:
    """The memory of pieces, without those that have none."""
    return [
        memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        for address, nbytes in places
        if nbytes
    ]


def _rows(sources: Mapping[int, Sequence[Place]]) -> dict[int, Packed | list[memoryview]]:
    """What each rank is sent, packed if it is mostly zeros; once for all ranks that are sent the same."""
    found: dict[int, Packed | list[memoryview]] = {}
    by_places: dict[tuple[Place, ...], Packed | list[memoryview]] = {}
    for rank, places in sources.items():
        same = tuple(places)
        if same not in by_places:
            pieces = _bytes_at(places)
            by_places[same] = _packed(pieces) or pieces
        found[rank] = by_places[same]
    return found


def _packed(pieces: Sequence[memoryview]) -> Packed | None:
    """A row without its zeros; pieces are put together for it only where enough of them may be left out."""
    if len(pieces) == 1:
        return pack(pieces[0])
    promising = sum(piece.nbytes for piece in pieces if may_pack(piece))
    if promising < (1 - MOST_HELD) * sum(piece.nbytes for piece in pieces) or not promising:
        return None
    return pack(memoryview(b"".join(pieces)))


def _without(pieces: list[memoryview], count: int) -> None:
    """Take the first ``count`` bytes off."""
    whole = 0
    while whole < len(pieces) and count >= len(pieces[whole]):
        count -= len(pieces[whole])
        whole += 1
    del pieces[:whole]
    if count:
        pieces[0] = pieces[0][count:]


class Wires(Carrier):
    """This rank's connections in a process group. Creating it is collective.

    Args:
        store: The group's.
        rank: This rank in it.
        size: Its ranks.
        near: Ranks that need none.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, near: Collection[int]) -> None:
        connections = connect(store, rank, size, near)
        self._wires = {other: _Wire(other, connection) for other, connection in connections.items()}
        super().__init__("wires", self._wires.keys())
        if self._wires:
            self._poll = select.epoll()
            self._poll.register(self._woken, select.EPOLLIN)
        for wire in self._wires.values():
            wire.connection.setblocking(False)
            self._poll.register(wire.connection, select.EPOLLIN)
        self._start()

    def exchange(
        self,
        key: int,
        sources: Mapping[int, Sequence[Place]],
        places: Mapping[int, Sequence[Place]],
        keep: tuple[torch.Tensor, ...],
        landed: Callable[[BaseException | None], None],
    ) -> int:
        """Send a row to ranks, and receive one from each."""
        rows = _rows(sources)  # before anything waits for it: it may find no memory
        flight = Flight(dict(places), set(sources), landed, keep)
        with self._flights.lock:
            ended = self._flights.begin(key, flight)
            stalls = any(self._wires[rank].stalls_at == key for rank in places)
        if ended is not None:
            self._flights.end(key, flight, ended)
            return 0
        if stalls:
            self._wake()
        left_out = 0
        for rank, row in rows.items():
            nbytes = sum(part.nbytes for part in row)
            left_out += bytes_in(places[rank]) - nbytes
            header = memoryview(_HEADER.pack(key, nbytes, isinstance(row, Packed)))
            self._send(self._wires[rank], _Row(key, flight, [header, *(part for part in row if part)]))
        return left_out

    # ------------------------------------------------------------------------------------------------ both threads

    def _send(self, wire: _Wire, row: _Row | None = None) -> None:
        """Send what the kernel takes, after what is waiting; the thread sends the rest."""
        with wire.lock:
            if row is not None:
                wire.outgoing.append(row)
            while wire.outgoing and not wire.is_gone:
                first = wire.outgoing[0]
                try:
                    count = wire.connection.sendmsg(first.parts)
                except BlockingIOError:
                    break
                except OSError:
                    wire.is_gone = True
                    break
                except BaseException:  # Ctrl-C: nobody knows how much has been sent
                    wire.is_gone = True
                    with contextlib.suppress(OSError):
                        wire.connection.shutdown(socket.SHUT_RDWR)
                    raise
                _without(first.parts, count)
                if not first.parts:
                    # With the lock: the other may have what it waits for, and hang up.
                    gone = wire.outgoing.popleft()
                    self._flights.row_left(gone.key, gone.flight, wire.rank)
            if bool(wire.outgoing) != wire.is_sending:
                wire.is_sending = not wire.is_sending
                self._watch(wire)
            is_gone = wire.is_gone
        if is_gone:
            self._flights.lose(wire.rank)

    def _watch(self, wire: _Wire) -> None:
        """Say what the thread is woken for; with the wire's lock held."""
        events = 0 if wire.stalls_at is not None else select.EPOLLIN
        events |= select.EPOLLOUT if wire.is_sending else 0
        with contextlib.suppress(OSError, ValueError):  # closed: whoever waits has been told
            self._poll.modify(wire.connection, events)

    # -------------------------------------------------------------------------------------------------- the thread

    def _serve(self) -> None:
        wires = {wire.connection.fileno(): wire for wire in self._wires.values()}
        while not self._is_over():
            for descriptor, events in self._poll.poll(LOOK_S if self._ends else None):
                if descriptor == self._woken.fileno():
                    self._was_woken()
                    due = [(wire, 0) for wire in wires.values() if wire.stalls_at is not None]
                else:
                    due = [(wires[descriptor], events)] if descriptor in wires else []
                for wire, what in due:
                    if not self._attend(wire, what):
                        del wires[wire.connection.fileno()]

    def _attend(self, wire: _Wire, events: int) -> bool:
        """Receive and send what can be; returns whether the rank is still there."""
        hangs_up = bool(events & (select.EPOLLHUP | select.EPOLLERR))
        is_there = events == select.EPOLLOUT or self._receive(wire)
        if is_there and events & select.EPOLLOUT:
            self._send(wire)
        if is_there and not hangs_up and not wire.is_gone:
            return True
        with wire.lock:
            wire.is_gone = True
        self._poll.unregister(wire.connection)
        self._flights.lose(wire.rank)
        return False

    def _receive(self, wire: _Wire) -> bool:
        """Take what has come; returns whether the rank is still there."""
        while self._has_place(wire):
            try:
                if wire.flight:
                    count = wire.connection.recvmsg_into(wire.missing)[0]
                else:
                    count = wire.connection.recv_into(memoryview(wire.header)[wire.header_filled :])
            except BlockingIOError:
                self._wake_at(wire, min(sum(map(len, wire.missing)), _WAKE_BYTES) if wire.flight else 1)
                return True
            except OSError:
                return False
            if not count:
                return False
            if wire.flight:
                _without(wire.missing, count)
            else:
                wire.header_filled += count
        return True

    def _has_place(self, wire: _Wire) -> bool:
        """Go on to the next row where one is complete; returns whether what comes next has somewhere to go."""
        while True:
            if wire.flight:
                if wire.missing:
                    return True
                key, flight = wire.key, wire.flight
                if wire.packed is not None:
                    unpack(wire.packed, _bytes_at(flight.places[wire.rank]))
                    wire.packed = None
                wire.flight = None
                self._flights.row_came(key, flight, wire.rank)
            if wire.header_filled < _HEADER.size:
                return True
            key, nbytes, is_packed = _HEADER.unpack(wire.header)
            with self._flights.lock:
                flight_there = self._flights.get(key)
                stalled, wire.stalls_at = wire.stalls_at, key if flight_there is None else None
            if stalled != wire.stalls_at:
                with wire.lock:
                    self._watch(wire)
            if flight_there is None:
                return False
            places = flight_there.places[wire.rank]
            due = bytes_in(places)
            if nbytes > most_bytes(due) if is_packed else nbytes != due:
                raise ValueError(f"{nbytes} bytes from rank {wire.rank} where {due} are due")
            wire.key, wire.flight, wire.header_filled = key, flight_there, 0
            if is_packed:
                wire.packed = memoryview(bytearray(nbytes))
            wire.missing = _bytes_at(places) if wire.packed is None else [wire.packed]

    def _wake_at(self, wire: _Wire, count: int) -> None:
        if wire.wakes_at != count:
            wire.wakes_at = count
            with contextlib.suppress(OSError):  # then it is woken more often
                wire.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _hang_up(self) -> None:
        for wire in self._wires.values():
            with wire.lock:
                wire.is_gone = True
                wire.connection.close()
        self._poll.close()

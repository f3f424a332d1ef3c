"""Ranks of different hosts, over TCP connections of our own.

[Note: a wire]
Two ranks share one connection, on which the rows of collectives follow one another in the order of issue, which is the
same on all ranks. A row is sent as soon as there is one, as far as the kernel takes it; a thread sends the rest and puts
what comes in its place. A row that this rank has not come to stays in the kernel, and holds up what follows it.

gloo would carry them too. But its thread and the one that sends share a lock which it tries to take again and again
while the other holds it: on a rank with one core both share the core, and it does so for as long as its time slice lasts
(strace and perf at 2 Gbit/s: a third of its 65 ms in a step of 700). It also wakes for every 64 KiB that arrive, where
the kernel can be asked to wake nobody before half a megabyte is there, and waits for the receiver's word before it sends.

Ranks that do not reach one another so are left to gloo.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import ipaddress
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from zerotune.engine import slots
from zerotune.engine.meeting import agreed_by_both, said_by_all
from zerotune.zero.flights import Flight, Flights, Place

logger = logging.getLogger(__name__)

SWITCH = "ZEROTUNE_WIRES"
"""Environment variable; 0 turns it off."""

_HEADER = struct.Struct("<QQ")  # key, bytes that follow
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<q{_TOKEN_BYTES}s")  # rank, token of the one that is called
_WAKE_BYTES = 512 * 1024
"""Of a row, so many arrive before the thread is woken: small enough to be in the cache when they are copied."""

_MEET_S = 30.0
_HELLO_S = 5.0
_EXIT_S = 3.0


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
    missing: memoryview = field(default_factory=lambda: memoryview(b""))
    """What has not come of its place."""
    stalls_at: int | None = None
    """Key of a row whose header is here, which this rank has not come to."""
    wakes_at: int = 1
    """Bytes that must be there before the thread is woken."""
    is_sending: bool = False
    """Whether the thread waits until more can be sent."""
    is_gone: bool = False


def _bytes_at(address: int, nbytes: int) -> memoryview:
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class Wires:
    """This rank's connections in a process group. Creating it is collective.

    Args:
        store: The group's.
        rank: This rank in it.
        size: Its ranks.
        near: Ranks that need none.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, near: Collection[int]) -> None:
        connections = _meet(store, rank, size, near)
        self._wires = {other: _Wire(other, connection) for other, connection in connections.items()}
        self._flights = Flights()
        self._ends = False
        if self._wires:
            self._woken, self._waker = socket.socketpair()
            self._waker.setblocking(False)
            self._poll = select.epoll()
            self._poll.register(self._woken, select.EPOLLIN)
            for wire in self._wires.values():
                wire.connection.setblocking(False)
                self._poll.register(wire.connection, select.EPOLLIN)
            thread = threading.Thread(target=self._run, name="wires", daemon=True)
            thread.start()
            atexit.register(self._end_and_join, thread)

    def end(self) -> None:
        """Hang up, once what is open has ended, or soon in any case; waits for nothing."""
        atexit.unregister(self._end_and_join)
        self._end()

    @property
    def ranks(self) -> Collection[int]:
        """Who is reached."""
        return self._wires.keys()

    def exchange(
        self,
        key: int,
        sources: Mapping[int, int],
        places: Mapping[int, Place],
        keep: tuple[torch.Tensor, ...],
        landed: Callable[[BaseException | None], None],
    ) -> None:
        """Send a row to ranks, and receive one from each; waits for nothing.

        Args:
            key: 63 bits, the same for this collective on every rank, and of no other that is open.
            sources: Address of what each gets; as many bytes as its own place has.
            places: Where each one's row goes.
            keep: The tensors that these are in.
            landed: Called, perhaps from another thread, once all have come and gone, or with what went wrong.
        """
        flight = Flight(dict(places), set(sources), landed, keep)
        with self._flights.lock:
            is_carried = self._flights.begin(key, flight)
            stalls = any(self._wires[rank].stalls_at == key for rank in places)
        if not is_carried:
            self._flights.end(key, flight, self._flights.closed_by)
            return
        if stalls:
            self._wake()
        for rank, address in sources.items():
            nbytes = places[rank].nbytes
            row = _Row(key, flight, [memoryview(_HEADER.pack(key, nbytes)), _bytes_at(address, nbytes)])
            self._send(self._wires[rank], row)

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
                while first.parts and count >= len(first.parts[0]):
                    count -= len(first.parts.pop(0))
                if first.parts:
                    first.parts[0] = first.parts[0][count:]
                else:
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

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._waker.send(b"w")

    # -------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        error: BaseException = RuntimeError("the group has ended")
        try:
            self._serve()
        except BaseException as failure:  # whatever it is, those who wait must hear of it
            error = RuntimeError(f"the thread that receives from other hosts failed: {failure!r}")
        finally:
            self._flights.close(error)
            for wire in self._wires.values():
                with wire.lock:
                    wire.is_gone = True
                    wire.connection.close()
            for each in (self._poll, self._woken, self._waker):
                each.close()

    def _serve(self) -> None:
        wires = {wire.connection.fileno(): wire for wire in self._wires.values()}
        ends_at: float | None = None
        while True:
            if self._ends:
                ends_at = ends_at or time.monotonic() + _EXIT_S
                if self._flights.is_idle or time.monotonic() > ends_at:
                    return
            for descriptor, events in self._poll.poll(None if ends_at is None else 0.1):
                if descriptor == self._woken.fileno():
                    self._woken.recv(4096)
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
            target = wire.missing if wire.flight else memoryview(wire.header)[wire.header_filled :]
            try:
                count = wire.connection.recv_into(target)
            except BlockingIOError:
                self._wake_at(wire, min(len(target), _WAKE_BYTES) if wire.flight else 1)
                return True
            except OSError:
                return False
            if not count:
                return False
            if wire.flight:
                wire.missing = wire.missing[count:]
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
                wire.flight, wire.missing = None, memoryview(b"")
                self._flights.row_came(key, flight, wire.rank)
            if wire.header_filled < _HEADER.size:
                return True
            key, nbytes = _HEADER.unpack(wire.header)
            with self._flights.lock:
                flight_there = self._flights.get(key)
                stalled, wire.stalls_at = wire.stalls_at, key if flight_there is None else None
            if stalled != wire.stalls_at:
                with wire.lock:
                    self._watch(wire)
            if flight_there is None:
                return False
            place = flight_there.places[wire.rank]
            if place.nbytes != nbytes:
                raise ValueError(f"{nbytes} bytes from rank {wire.rank} where {place.nbytes} are due")
            wire.key, wire.flight, wire.header_filled = key, flight_there, 0
            wire.missing = _bytes_at(place.address, nbytes)

    def _wake_at(self, wire: _Wire, count: int) -> None:
        if wire.wakes_at != count:
            wire.wakes_at = count
            with contextlib.suppress(OSError):  # then it is woken more often
                wire.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    # ---------------------------------------------------------------------------------------------------- the end

    def _end(self) -> None:
        self._ends = True
        if self._wires:
            self._wake()

    def _end_and_join(self, thread: threading.Thread) -> None:
        """At exit: what this rank began with the others, it ends with them."""
        self._end()
        thread.join(2 * _EXIT_S)


# ------------------------------------------------------------------------------------------------------- meeting


def _meet(store: dist.Store, rank: int, size: int, near: Collection[int]) -> dict[int, socket.socket]:
    """Connect to every rank that is not near and that can be reached."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    nodes = said_by_all(store, "wires/nodes", rank, size, slots.this_node())
    listener = _listener(store, size, len(set(nodes)) == 1) if len(near) < size - 1 else None
    try:
        mine = None if listener is None else [*listener.getsockname()[:2], token.hex()]
        everyone = said_by_all(store, "wires", rank, size, mine)
        far = {other: everyone[other] for other in range(size) if other != rank and other not in near}
        known = {other: _Called(*theirs) for other, theirs in far.items() if theirs and listener is not None}
        called = _call(rank, known)
        callers = said_by_all(store, "wires/called", rank, size, list(called))
        due = {other for other in known if other < rank and rank in callers[other]}
        connections: dict[int, socket.socket] = {}
        if listener is not None:
            with contextlib.suppress(OSError):
                _answer(listener, rank, token, due, known, connections)
            _hear_answers(called, token, connections)
        met = agreed_by_both(store, "wires/met", rank, size, list(connections))
        for other in connections.keys() - set(met):
            connections.pop(other).close()
        for connection in connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if known.keys() - connections.keys():
            logger.info("ranks %s are reached by gloo alone", sorted(known.keys() - connections.keys()))
        return connections
    finally:
        if listener is not None:
            listener.close()


class _Called(NamedTuple):
    """Where a rank can be called, and what it knows its callers by."""

    host: str
    port: int
    token: str


def _listener(store: dist.Store, size: int, is_one_host: bool) -> socket.socket | None:
    """Where this rank can be called; ``None`` where it cannot."""
    if os.environ.get(SWITCH) == "0" or not hasattr(select, "epoll"):
        return None
    for family, address in own_addresses(store, is_one_host):
        with contextlib.suppress(OSError):
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.bind((address, 0))
                listener.listen(size)
            except OSError:
                listener.close()
                raise
            return listener
    return None


def own_addresses(store: dist.Store, is_one_host: bool) -> Iterator[tuple[socket.AddressFamily, str]]:
    """Addresses of this host, the best first.

    That of the interface that is named for gloo; that by which the store is reached, or this host's own name; any other.
    Other hosts have a loopback of their own, so it serves ranks of one host alone.

    Args:
        store: The group's.
        is_one_host: Whether all ranks are on this one.
    """
    interfaces = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        named = sorted(interfaces.get(name, ()), key=lambda each: each.family != socket.AF_INET)
        yield from ((each.family, each.address) for each in named if each.family in families)
    found = []
    for host in (_host_of(store), os.environ.get("MASTER_ADDR"), socket.gethostname()):
        if host:
            with contextlib.suppress(OSError):
                found += [_way_to(*each) for each in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)]
    found += [
        (each.family, each.address)
        for all_of in interfaces.values()
        for each in all_of
        if each.family in families
    ]
    for family, address in found:
        if is_one_host or not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            yield family, address


def _way_to(family: int, kind: int, protocol: int, _: str, target: Any) -> tuple[socket.AddressFamily, str]:
    """The address that this host has on the way to another; sends nothing."""
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return socket.AddressFamily(family), probe.getsockname()[0]


def _host_of(store: dist.Store) -> str | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None


def _call(rank: int, known: Mapping[int, _Called]) -> dict[int, socket.socket]:
    """Call the higher ranks, all of which listen, and say who calls; those that cannot be reached are left out."""
    called: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _MEET_S
    for other, (host, port, token) in known.items():
        if other > rank:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, port), timeout=_left(deadline))
                connection.sendall(_HELLO.pack(rank, bytes.fromhex(token)))
                called[other] = connection
    return called


def _answer(
    listener: socket.socket,
    rank: int,
    token: bytes,
    due: Collection[int],
    known: Mapping[int, _Called],
    connections: dict[int, socket.socket],
) -> None:
    """Be called by lower ranks; strangers, who do not know the token, are sent away.

    Args:
        listener: Where this rank is called.
        rank: This rank.
        token: Who calls it must know.
        due: Who has called.
        known: What they know their callers by.
        connections: Receives those that are met.

    Raises:
        OSError: Somebody's call has not come in time.
    """
    deadline = time.monotonic() + _MEET_S
    waiting = set(due)
    while waiting:
        if time.monotonic() > deadline:
            raise TimeoutError
        listener.settimeout(_left(deadline))
        caller, _ = listener.accept()
        other, word = _hello(caller, min(deadline, time.monotonic() + _HELLO_S))
        if other in waiting and secrets.compare_digest(word, token):
            caller.settimeout(_HELLO_S)
            caller.sendall(_HELLO.pack(rank, bytes.fromhex(known[other].token)))
            connections[other] = caller
            waiting.remove(other)
        else:
            caller.close()


def _hear_answers(
    called: Mapping[int, socket.socket], token: bytes, connections: dict[int, socket.socket]
) -> None:
    """Whoever was called knows this rank's token."""
    deadline = time.monotonic() + _MEET_S
    for other, connection in called.items():
        if _hello(connection, deadline) == (other, token):
            connections[other] = connection
        else:
            connection.close()


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _hello(connection: socket.socket, deadline: float) -> tuple[int, bytes]:
    """Rank and token that the other end gives; of a stranger, anything."""
    given = b""
    try:
        while len(given) < _HELLO.size and time.monotonic() < deadline:
            connection.settimeout(_left(deadline))
            more = connection.recv(_HELLO.size - len(given))
            if not more:
                break
            given += more
    except OSError:
        return -1, b""
    rank, token = _HELLO.unpack(given.ljust(_HELLO.size, b"\0"))
    return rank, token

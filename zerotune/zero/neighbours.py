"""Ranks of one host that read one another's memory, where TCP would carry it through the kernel twice.

[Note: reading]
Linux lets a process copy from the memory of another (``process_vm_readv``) if it may trace it: as root, or as the same user where
nothing forbids it. A rank that has something for a neighbour tells it where that is, over a socket; the neighbour copies it to
its place and says so, and only then has the collective ended for the first. So nothing that a neighbour still reads is
ever overwritten by us, and a collective is over in the same sense as on gloo. Ranks that may not read each other, or that are
on different hosts or in different network namespaces (which stand for hosts on a shaped link), are no neighbours.

Measured for 1.6 MB: 10 GB/s, on the core of the reader alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zerotune.engine import slots
from zerotune.engine.meeting import agreed_by_both, said_by_all
from zerotune.zero.carrier import LOOK_S, MOST_PIECES, Carrier
from zerotune.zero.flights import Flight, Place, after, bytes_in

SWITCH = "ZEROTUNE_NEIGHBOURS"
"""Environment variable; 0 turns it off."""

_MESSAGE = struct.Struct("<Bq")  # what, key; with what is ready, where it is, piece by piece
_PIECE = struct.Struct("<QQ")
_LONGEST = _MESSAGE.size + MOST_PIECES * _PIECE.size
_READY, _DONE = 0, 1
_HELLO = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")
_MEET_S = 30.0
_TOKEN_BYTES = 16
_NO_ROOM = (errno.EAGAIN, errno.ENOBUFS)


class _Extent(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _process_vm_readv() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    pointer = ctypes.POINTER(_Extent)
    function.restype = ctypes.c_ssize_t
    function.argtypes = (
        ctypes.c_int, pointer, ctypes.c_ulong, pointer, ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip
    return function  # type: ignore[no-any-return]


_READ = _process_vm_readv()


def read_memory(pid: int, sources: Sequence[Place], targets: Sequence[Place]) -> None:
    """Copy from another process.

    Args:
        pid: Which.
        sources: Pieces there.
        targets: Pieces here, of as many bytes together; at most ``MOST_PIECES`` of either.

    Raises:
        OSError: It is not allowed, the process is gone, or has nothing there.
    """
    if _READ is None:
        raise OSError("there is no process_vm_readv here")
    missing = bytes_in(targets)
    while missing:
        copied = _READ(pid, _extents(targets), len(targets), _extents(sources), len(sources), 0)
        if copied <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        missing -= copied
        if missing:
            sources, targets = list(after(sources, copied)), list(after(targets, copied))


def _extents(places: Sequence[Place]) -> ctypes.Array[_Extent]:
    return (_Extent * len(places))(*(_Extent(*place) for place in places))


@dataclass
class _Peer:
    """A neighbour."""

    pid: int
    connection: socket.socket
    ready: dict[int, list[Place]] = field(default_factory=dict)
    """Where its rows are, by key, of collectives that it came to first."""
    unsent: deque[bytes] = field(default_factory=deque)
    """Messages that the connection had no room for."""
    is_gone: bool = False


class Neighbours(Carrier):
    """This rank's neighbours in a process group. Creating it is collective.

    Args:
        store: The group's.
        rank: This rank in it.
        size: Its ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._peers = _meet(store, rank, size)
        super().__init__("neighbours", self._peers.keys())
        self._lock = self._flights.lock
        for peer in self._peers.values():
            peer.connection.setblocking(False)
        self._start()

    def exchange(
        self,
        key: int,
        sources: Mapping[int, Sequence[Place]],
        places: Mapping[int, Sequence[Place]],
        keep: tuple[torch.Tensor, ...],
        landed: Callable[[BaseException | None], None],
    ) -> int:
        """Offer a row to every neighbour, and fetch one from each."""
        flight = Flight(dict(places), set(sources), landed, keep)
        with self._lock:
            ended = self._flights.begin(key, flight)
            for rank, pieces in sources.items():
                where = b"".join(_PIECE.pack(*piece) for piece in pieces)
                self._send(self._peers[rank], _MESSAGE.pack(_READY, key) + where)
            wakes = any(key in peer.ready or peer.is_gone or peer.unsent for peer in self._peers.values())
        if ended is not None:
            self._flights.end(key, flight, ended)
        elif wakes:
            self._wake()
        return 0

    def _send(self, peer: _Peer, message: bytes) -> None:
        """Send, or leave it to the thread where there is no room; with the lock held."""
        if not peer.unsent:
            try:
                peer.connection.send(message)
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    return  # it is gone, as the thread finds out
        peer.unsent.append(message)

    # ---------------------------------------------------------------------------------------------- the thread

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        ranks = {peer.connection.fileno(): rank for rank, peer in self._peers.items()}
        for descriptor in ranks:
            poller.register(descriptor, select.POLLIN)
        while not self._is_over():
            for descriptor, _ in poller.poll(LOOK_S * 1e3 if self._ends else None):
                rank = ranks.get(descriptor)
                if rank is None:
                    self._was_woken()
                    self._catch_up()
                elif not self._hear(rank):
                    poller.unregister(descriptor)
                    del ranks[descriptor]
                    self._lose(rank)
            for descriptor, rank in ranks.items():
                has_more = self._send_what_is_unsent(self._peers[rank])
                poller.modify(descriptor, select.POLLIN | (select.POLLOUT if has_more else 0))

    def _send_what_is_unsent(self, peer: _Peer) -> bool:
        """Returns whether there is more than the connection takes now."""
        if not peer.unsent:
            return False
        with self._lock:
            waiting = list(peer.unsent)
            peer.unsent.clear()
            for message in waiting:
                self._send(peer, message)
            return bool(peer.unsent)

    def _hear(self, rank: int) -> bool:
        """Take one message of a neighbour, if there is one; returns whether it is still there."""
        peer = self._peers[rank]
        try:
            message = peer.connection.recv(_LONGEST)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return True  # said once, before the last words of one who left ours unread
        except OSError:
            return False
        if len(message) < _MESSAGE.size:
            return False
        what, key = _MESSAGE.unpack_from(message)
        sources = [Place(*piece) for piece in _PIECE.iter_unpack(message[_MESSAGE.size :])]
        with self._lock:
            flight = self._flights.get(key)
            if what == _READY and flight is None:
                peer.ready[key] = sources  # this rank has not come to it
                return True
        if flight is not None:
            if what == _READY:
                self._fetch(key, flight, rank, sources)
            else:
                self._flights.row_left(key, flight, rank)
        return True

    def _catch_up(self) -> None:
        """Fetch what neighbours had offered before this rank came to it."""
        with self._lock:
            waiting = [
                (key, rank, peer.ready.pop(key))
                for key in self._flights.open_keys()
                for rank, peer in self._peers.items()
                if key in peer.ready
            ]
            gone = [rank for rank, peer in self._peers.items() if peer.is_gone]
        for key, rank, sources in waiting:
            flight = self._flights.get(key)
            if flight is not None:  # it may have failed meanwhile
                self._fetch(key, flight, rank, sources)
        for rank in gone:
            self._lose(rank)

    def _fetch(self, key: int, flight: Flight, rank: int, sources: Sequence[Place]) -> None:
        peer = self._peers[rank]
        try:
            read_memory(peer.pid, sources, flight.places[rank])
        except OSError as error:
            failure = RuntimeError(f"rank {rank} could not be read from: {error.strerror}")
            self._flights.end(key, flight, failure)
            return
        with self._lock:
            self._send(peer, _MESSAGE.pack(_DONE, key))
        self._flights.row_came(key, flight, rank)

    def _lose(self, rank: int) -> None:
        """A neighbour has hung up."""
        self._peers[rank].is_gone = True
        self._flights.lose(rank)

    def _hang_up(self) -> None:
        for peer in self._peers.values():
            peer.connection.close()


# ------------------------------------------------------------------------------------------------------- meeting


def _host() -> str | None:
    """What processes have in common that may be neighbours; ``None`` where nobody may."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid", "user")]
    except OSError:
        return None
    return json.dumps([slots.this_node(), *spaces])


def _meet(store: dist.Store, rank: int, size: int) -> dict[int, _Peer]:
    """Find the ranks that can be read from and that can read from here, and connect to them."""
    token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
    host, name = _host(), f"zerotune-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if host is not None else None
    try:
        if listener is not None:
            listener.bind("\0" + name)
            listener.listen(size)
            listener.settimeout(_MEET_S)
        mine = [host, os.getpid(), name, ctypes.addressof(token), token.raw.hex()]
        everyone = said_by_all(store, "neighbours", rank, size, mine)
        readable = [
            other
            for other, (theirs, pid, _, address, expected) in enumerate(everyone)
            if other != rank and host is not None and theirs == host and _holds(pid, address, expected)
        ]
        # Who reads has read the token by the time that all have answered.
        chosen = agreed_by_both(store, "neighbours/reads", rank, size, readable)
        if not chosen:
            agreed_by_both(store, "neighbours/met", rank, size, [])
            return {}
        assert listener is not None
        known = {other: (everyone[other][2], everyone[other][1]) for other in chosen}
        connections = _connect(listener, rank, known)
        met = agreed_by_both(store, "neighbours/met", rank, size, list(connections))
        for other in connections.keys() - set(met):
            connections.pop(other).close()
        return {other: _Peer(everyone[other][1], connections[other]) for other in met}
    finally:
        if listener is not None:
            listener.close()


def _holds(pid: int, address: int, expected: str) -> bool:
    """Whether another process can be read from, and is the one that is meant."""
    found = ctypes.create_string_buffer(_TOKEN_BYTES)
    try:
        read_memory(pid, [Place(address, _TOKEN_BYTES)], [Place(ctypes.addressof(found), _TOKEN_BYTES)])
    except OSError:
        return False
    return found.raw.hex() == expected


def _connect(
    listener: socket.socket, rank: int, chosen: Mapping[int, tuple[str, int]]
) -> dict[int, socket.socket]:
    """Call the higher ranks, be called by the lower ones; whoever is not who it should be is left out.

    Args:
        listener: Where this rank is called.
        rank: This rank.
        chosen: Name and process of every rank that is to be met.
    """
    connections: dict[int, socket.socket] = {}
    with contextlib.suppress(OSError):
        for other, (name, pid) in chosen.items():
            if other > rank:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.settimeout(_MEET_S)
                connection.connect("\0" + name)
                connection.send(_HELLO.pack(rank))
                if _process_at(connection) == pid:
                    connections[other] = connection
                else:
                    connection.close()
        while any(other < rank and other not in connections for other in chosen):
            connection, _ = listener.accept()
            connection.settimeout(_MEET_S)
            hello = connection.recv(_HELLO.size)
            caller: int = _HELLO.unpack(hello)[0] if len(hello) == _HELLO.size else -1
            if caller in chosen and _process_at(connection) == chosen[caller][1]:
                connections[caller] = connection
            else:
                connection.close()  # a stranger
    return connections


def _process_at(connection: socket.socket) -> int:
    """Number of the process at the other end, as the kernel knows it."""
    pid, _, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(pid)

"""Connecting ranks of different hosts: each calls the higher ones, and both know a token that the group's store holds."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from zerotune.engine import slots
from zerotune.engine.meeting import agreed_by_both, said_by_all

logger = logging.getLogger(__name__)

SWITCH = "ZEROTUNE_WIRES"
"""Environment variable; 0 leaves to gloo whom neighbours do not reach."""

_TOKEN_BYTES = 16
HELLO = struct.Struct(f"<q{_TOKEN_BYTES}s")
"""Rank, and the token of the one that is spoken to."""

HELLO_S = 5.0
"""How long a caller may take to say it."""

_MEET_S = 30.0


def connect(store: dist.Store, rank: int, size: int, near: Collection[int]) -> dict[int, socket.socket]:
    """Connect to every rank that is not near and that can be reached. Collective.

    Args:
        store: The group's.
        rank: This rank in it.
        size: Its ranks.
        near: Ranks that need no connection.

    Returns:
        Connections by rank; both ends have them.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    nodes = said_by_all(store, "wires/nodes", rank, size, slots.this_node())
    listener = _listener(store, size, len(set(nodes)) == 1) if len(near) < size - 1 else None
    try:
        mine = None if listener is None else [*listener.getsockname()[:2], token.hex()]
        everyone = said_by_all(store, "wires", rank, size, mine)
        far = {other: everyone[other] for other in range(size) if other != rank and other not in near}
        known = {other: Called(*theirs) for other, theirs in far.items() if theirs and listener is not None}
        called = call(rank, known)
        callers = said_by_all(store, "wires/called", rank, size, list(called))
        due = {other for other in known if other < rank and rank in callers[other]}
        connections: dict[int, socket.socket] = {}
        if listener is not None:
            with contextlib.suppress(OSError):
                answer(listener, rank, token, due, known, connections)
            hear_answers(called, token, connections)
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


class Called(NamedTuple):
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


def call(rank: int, known: Mapping[int, Called]) -> dict[int, socket.socket]:
    """Call the higher ranks, all of which listen, and say who calls; those that cannot be reached are left out."""
    called: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _MEET_S
    for other, (host, port, token) in known.items():
        if other > rank:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, port), timeout=_left(deadline))
                connection.sendall(HELLO.pack(rank, bytes.fromhex(token)))
                called[other] = connection
    return called


def answer(
    listener: socket.socket,
    rank: int,
    token: bytes,
    due: Collection[int],
    known: Mapping[int, Called],
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
        other, word = _hello(caller, min(deadline, time.monotonic() + HELLO_S))
        if other in waiting and secrets.compare_digest(word, token):
            caller.settimeout(HELLO_S)
            caller.sendall(HELLO.pack(rank, bytes.fromhex(known[other].token)))
            connections[other] = caller
            waiting.remove(other)
        else:
            caller.close()


def hear_answers(
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
        while len(given) < HELLO.size and time.monotonic() < deadline:
            connection.settimeout(_left(deadline))
            more = connection.recv(HELLO.size - len(given))
            if not more:
                break
            given += more
    except OSError:
        return -1, b""
    rank, token = HELLO.unpack(given.ljust(HELLO.size, b"\0"))
    return rank, token

"""How ranks of different hosts find one another, and who is sent away."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from zerotune.zero import wiring


def test_strangers_are_sent_away() -> None:
    """Of four that call, one knows the token."""
    tokens = [bytes([rank]) * 16 for rank in range(2)]
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    known = [wiring.Called("127.0.0.1", address[1], token.hex()) for token in tokens]
    strangers = [socket.create_connection(address) for _ in range(3)]
    strangers[0].shutdown(socket.SHUT_WR)
    strangers[1].sendall(wiring.HELLO.pack(0, b"?" * 16))
    strangers[2].sendall(b"half a word")
    called = wiring.call(0, {1: known[1]})
    answered: dict[int, socket.socket] = {}
    with mock.patch.object(wiring, "HELLO_S", 0.5):
        wiring.answer(listener, 1, tokens[1], {0}, {0: known[0]}, answered)
    heard: dict[int, socket.socket] = {}
    wiring.hear_answers(called, tokens[0], heard)
    assert heard.keys() == {1} and answered.keys() == {0}
    heard[1].sendall(b"word")
    assert answered[0].recv(4) == b"word", "they are connected to each other"
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    for each in (*strangers, heard[1], answered[0], listener):
        each.close()


def test_who_answers_with_another_token_is_not_met() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(wiring.HELLO.pack(1, b"?" * 16))
    heard: dict[int, socket.socket] = {}
    wiring.hear_answers({1: ours}, b"!" * 16, heard)
    assert not heard and theirs.recv(1) == b""
    theirs.close()


@pytest.mark.parametrize(
    ("named", "is_one_host", "first"),
    [
        ("", True, "127.0.0.1"),
        ("", False, "192.0.2.7"),
        ("eth7", False, "192.0.2.7"),
        ("lo", True, "127.0.0.1"),
        ("none", True, "127.0.0.1"),
    ],
)
def test_an_address_that_others_can_call(named: str, is_one_host: bool, first: str) -> None:
    """Its own name leads to its loopback, as on Debian; ranks of other hosts have a loopback of their own."""

    def address(text: str) -> Any:
        return mock.Mock(family=socket.AF_INET, address=text)

    interfaces = {"lo": [address("127.0.0.1")], "eth7": [address("192.0.2.7")]}
    with (
        mock.patch.object(wiring.psutil, "net_if_addrs", lambda: interfaces),
        mock.patch.object(socket, "gethostname", lambda: "localhost"),
        mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": named, "MASTER_ADDR": "127.0.0.1"}),
    ):
        found = list(wiring.own_addresses(dist.HashStore(), is_one_host))
    assert found[0] == (socket.AF_INET, first)
    assert is_one_host or (socket.AF_INET, "127.0.0.1") not in found

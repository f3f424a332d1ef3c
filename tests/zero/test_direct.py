"""Rows between ranks, whoever carries them: what arrives, from whom, and that ranks which come late are waited for."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool, run_on_ranks
from zerotune.engine import LedgerKeeper, RankGroup, slots
from zerotune.engine.guard import CollectiveFailed
from zerotune.zero import direct, neighbours, wiring
from zerotune.zero.comm import Communicator
from zerotune.zero.flights import Place, place_of


def value(sender: int, receiver: int, number: int) -> float:
    return 100.0 * number + 10.0 * sender + receiver


def switches(carrier: str) -> dict[str, str]:
    """What leaves all that can go by a carrier to it."""
    return {neighbours.SWITCH: str(int(carrier == "neighbours")), wiring.SWITCH: str(int(carrier != "gloo"))}


def group_of(rank: int, size: int, carrier: str, **options: Any) -> RankGroup:
    """A new group whose ranks reach one another as neighbours, over wires, or by gloo."""
    with mock.patch.dict(os.environ, switches(carrier)):
        process_group = dist.new_group(backend="gloo", **options)
        found = direct.direct_between(process_group, rank, size)
    others = set(range(size)) - {rank}
    assert set(found.neighbours.ranks) == (others if carrier == "neighbours" else set())
    assert set(found.wires.ranks) == (others if carrier == "wires" else set())
    return RankGroup(process_group, rank, size, torch.device("cpu"))


CARRIERS = ["neighbours", "wires", "gloo"]


def many_in_flight(rank: int, size: int, widths: list[int], carrier: str) -> None:
    """Gathers and exchanges by turns, issued in one order, waited for in another, by ranks that are late at random."""
    group = group_of(rank, size, carrier)
    comm = Communicator(group, LedgerKeeper(rank), overlap=True)
    assert comm.rows_received == size - 1
    moods = random.Random(rank)
    flying = []
    for number, width in enumerate(widths):
        time.sleep(moods.random() * 0.01)
        received = torch.full(((size - 1) * width,), -1.0)
        if number % 2:
            sent = torch.cat([torch.full((width,), value(rank, to, number)) for to in range(size)])
            work = comm.exchange(received, sent, "gradient", [f"unit{number}"])
            own = sent.view(size, width)[rank]
        else:
            own = torch.full((width,), value(rank, 0, number))
            work = comm.all_gather(received, own, "forward", [f"unit{number}"])
        flying.append((number, width, received, own, work))
    random.Random(7).shuffle(flying)  # alike on all ranks or not, it must not matter
    for number, width, received, own, work in flying:
        work.wait()
        rows = torch.stack(comm.rows_in_order(received, own))
        assert rows.shape == (size, width)
        ((mine, first, end),) = comm.own_row(own)
        assert (first, end) == (rank, rank + 1) and torch.equal(mine, own)
        for theirs, first, end in comm.rows_of_others(received):
            assert torch.equal(theirs.reshape(end - first, width), rows[first:end])
        for sender, row in enumerate(rows):
            expected = value(sender, rank if number % 2 else 0, number)
            assert torch.equal(row, torch.full((width,), expected))


WIDTHS = [1, 16, 100_000, 7, 0, 3, 250_000, 16, 1, 5]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_row_comes_from_its_rank(ranks: int, carrier: str) -> None:
    run_on_ranks(ranks, many_in_flight, WIDTHS, carrier)


def two_hosts(rank: int, size: int) -> None:
    """Ranks 0 and 1 on one host, 2 and 3 on another."""
    with mock.patch.object(slots, "this_node", lambda: f"host {rank // 2}"):
        process_group = dist.new_group(backend="gloo")
        found = direct.direct_between(process_group, rank, size)
    assert list(found.neighbours.ranks) == [rank ^ 1]
    assert set(found.wires.ranks) == ({2, 3} if rank < 2 else {0, 1})
    comm = Communicator(RankGroup(process_group, rank, size, torch.device("cpu")), LedgerKeeper(rank), True)
    for number in range(5):
        own = torch.full((1000,), value(rank, 0, number))
        received = torch.empty(3 * 1000)
        comm.all_gather(received, own, "forward", ["unit"]).wait()
        for sender, row in enumerate(comm.rows_in_order(received, own)):
            assert torch.equal(row, torch.full((1000,), value(sender, 0, number)))


def test_neighbours_read_and_wires_lead_to_other_hosts() -> None:
    run_on_ranks(4, two_hosts)


def overwrite_at_once(rank: int, size: int, carrier: str) -> None:
    """What was sent may be overwritten as soon as it has been waited for, however late the other is."""
    comm = Communicator(group_of(rank, size, carrier), LedgerKeeper(rank), overlap=True)
    own, received = torch.empty(500_000), torch.empty(500_000)
    for number in range(6):
        if number % size == rank:
            time.sleep(0.05)
        own.fill_(number * 10 + rank)
        comm.all_gather(received, own, "forward", ["unit"]).wait()
        own.fill_(-1)
        assert received.eq(number * 10 + 1 - rank).all()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_was_sent_may_be_overwritten_once_it_has_landed(carrier: str) -> None:
    run_on_ranks(2, overwrite_at_once, carrier)


def issue_without_waiting(rank: int, size: int, carrier: str) -> None:
    """More messages than a connection holds, one rank long after the other."""
    comm = Communicator(group_of(rank, size, carrier), LedgerKeeper(rank), overlap=True)
    if rank == 1:
        time.sleep(1)
    flying = []
    for number in range(1500):
        received = torch.full((2,), -1.0)
        work = comm.all_gather(received, torch.full((2,), float(number)), "forward", [f"unit{number % 9}"])
        flying.append((number, received, work))
    for number, received, work in flying:
        work.wait()
        assert received.eq(number).all()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_many_may_be_in_flight(carrier: str) -> None:
    run_on_ranks(2, issue_without_waiting, carrier)


def more_than_the_kernel_holds(rank: int, size: int, carrier: str) -> None:
    """Either rank in turn is far ahead, by more than lies in the buffers between the two."""
    comm = Communicator(group_of(rank, size, carrier), LedgerKeeper(rank), overlap=True)
    for late in range(size):
        if rank == late:
            time.sleep(0.5)
        flying = []
        for number in range(12):
            received = torch.full((1_000_000,), -1.0)
            own = torch.full((1_000_000,), value(rank, 0, number))
            flying.append((number, received, own, comm.all_gather(received, own, "forward", ["unit"])))
        for number, received, _, work in flying:
            work.wait()
            assert received.eq(value(1 - rank, 0, number)).all()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_rank_may_be_ahead_by_more_than_the_kernel_holds(carrier: str) -> None:
    run_on_ranks(2, more_than_the_kernel_holds, carrier)


def hang_up(rank: int, size: int) -> tuple[str, float]:
    group = group_of(rank, size, "wires")
    comm = Communicator(group, LedgerKeeper(rank), overlap=True)
    assert group.process_group is not None
    found = direct.direct_between(group.process_group, rank, size).wires
    large = torch.zeros(5_000_000)
    if rank == 1:
        (wire,) = found._wires.values()
        time.sleep(0.3)
        wire.connection.shutdown(socket.SHUT_RDWR)
        time.sleep(2)
        return "", 0.0
    started = time.monotonic()
    work = comm.all_gather(torch.empty_like(large), large, "forward", ["unit"])
    with pytest.raises(CollectiveFailed) as failed:
        work.wait()
    seconds = time.monotonic() - started
    landed: list[BaseException | None] = []
    found.exchange(
        1, {1: [Place(large.data_ptr(), 8)]}, {1: [Place(large.data_ptr(), 8)]}, (large,), landed.append
    )
    assert len(landed) == 1 and isinstance(landed[0], RuntimeError), "it would be waited for in vain"
    return failed.value.message, seconds


def test_a_rank_that_hangs_up_is_noticed_at_once() -> None:
    pool = RankPool(2)
    try:
        (message, seconds), _ = pool.run(hang_up)
    finally:
        pool.close(force=True)
    assert "during a collective (Connection closed by rank 1)" in message
    assert seconds < 10, "far below the group's time-out"


def some_wires(rank: int, size: int) -> None:
    """Rank 1 cannot be called, as if a wall stood before it."""
    refuse = wiring.call

    def call(rank: int, known: Any) -> Any:
        return refuse(
            rank, {other: each._replace(port=1) if other == 1 else each for other, each in known.items()}
        )

    switches = {neighbours.SWITCH: "0", wiring.SWITCH: "1"}
    started = time.monotonic()
    with mock.patch.dict(os.environ, switches), mock.patch.object(wiring, "call", call):
        process_group = dist.new_group(backend="gloo")
        found = direct.direct_between(process_group, rank, size)
    assert time.monotonic() - started < 20, "nobody waits for a call that does not come"
    assert set(found.wires.ranks) == {0: {2}, 1: {2}, 2: {0, 1}}[rank]
    assert found._by_gloo == {0: [1], 1: [0], 2: []}[rank]
    comm = Communicator(RankGroup(process_group, rank, size, torch.device("cpu")), LedgerKeeper(rank), True)
    for number in range(4):
        own = torch.full((1000,), value(rank, 0, number))
        received = torch.empty(2 * 1000)
        comm.all_gather(received, own, "forward", ["unit"]).wait()
        for sender, row in enumerate(comm.rows_in_order(received, own)):
            assert torch.equal(row, torch.full((1000,), value(sender, 0, number)))


def test_whom_no_wire_reaches_gloo_does() -> None:
    run_on_ranks(3, some_wires)


def groups_side_by_side(rank: int, size: int, carrier: str) -> None:
    """Two groups at once, and one after they are gone."""
    for turn in range(2):
        groups = [group_of(rank, size, carrier) for _ in range(2)]
        comms = [Communicator(group, LedgerKeeper(rank), overlap=True) for group in groups]
        flying = []
        for number in range(6):
            own = torch.full((1000,), value(rank, 0, number) + turn)
            received = torch.empty(1000)
            flying.append(
                (number, received, own, comms[number % 2].all_gather(received, own, "forward", ["u"]))
            )
        for number, received, _, work in flying:
            work.wait()
            assert received.eq(value(1 - rank, 0, number) + turn).all()
        for group in groups:
            dist.destroy_process_group(group.process_group)
        del groups, comms, group


@pytest.mark.parametrize("carrier", CARRIERS)
def test_groups_do_not_disturb_one_another(carrier: str) -> None:
    run_on_ranks(2, groups_side_by_side, carrier)


def offer_after_the_end(rank: int, size: int, carrier: str) -> None:
    process_group = group_of(rank, size, carrier).process_group
    assert process_group is not None
    found = getattr(direct.direct_between(process_group, rank, size), carrier)
    dist.barrier()
    before = {thread for thread in threading.enumerate() if thread.name == carrier}
    found.end()
    for thread in before:
        thread.join(2)  # the session's own go on
    row = torch.zeros(2)
    landed: list[BaseException | None] = []
    found.exchange(1, {1 - rank: [place_of(row)]}, {1 - rank: [place_of(row)]}, (row,), landed.append)
    assert len(landed) == 1 and isinstance(landed[0], RuntimeError), "it would be waited for in vain"


@pytest.mark.parametrize("carrier", ["neighbours", "wires"])
def test_what_is_offered_after_the_end_fails_at_once(carrier: str) -> None:
    run_on_ranks(2, offer_after_the_end, carrier)


def never_come(rank: int, size: int, carrier: str) -> float:
    group = group_of(rank, size, carrier, timeout=timedelta(seconds=3))
    comm = Communicator(group, LedgerKeeper(rank), True)
    started = time.monotonic()
    if rank == 0:
        work = comm.all_gather(torch.empty(2), torch.zeros(2), "forward", ["unit"])
        with pytest.raises(CollectiveFailed, match=r"(?i)timed out"):
            work.wait()
    else:
        time.sleep(8)
    return time.monotonic() - started


@pytest.mark.parametrize("carrier", CARRIERS)
def test_the_groups_own_time_out_holds(carrier: str) -> None:
    pool = RankPool(2)
    try:
        seconds, _ = pool.run(never_come, carrier)
    finally:
        pool.close(force=True)
    assert 2 < seconds < 7


def read_what_is_not_there(rank: int, size: int) -> None:
    buffer = ctypes.create_string_buffer(16)
    here = [Place(ctypes.addressof(buffer), 16)]
    with pytest.raises(OSError):
        neighbours.read_memory(os.getpid(), [Place(16, 16)], here)
    with pytest.raises(OSError):
        neighbours.read_memory(2**22 + 5, here, here)


def test_reading_what_is_not_there_is_an_error() -> None:
    run_on_ranks(1, read_what_is_not_there)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_loop_that_ends_with_gathers_in_flight_ends_in_peace(carrier: str) -> None:
    """Processes of their own, to their very end: what `step()` began for a next step is still on its way."""
    loop = Path(__file__).parents[2] / "examples" / "own_loop.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        str(loop),
    ]
    for _ in range(2):
        done = subprocess.run(
            command,
            env=os.environ | switches(carrier),
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]

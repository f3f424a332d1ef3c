"""Direct sends and receives: what arrives, from whom, and that ranks which come late are waited for."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from zerotune.engine import LedgerKeeper, RankGroup
from zerotune.zero.comm import Communicator


def value(sender: int, receiver: int, number: int) -> float:
    return 100.0 * number + 10.0 * sender + receiver


def many_in_flight(rank: int, size: int, widths: list[int]) -> None:
    """Gathers and exchanges by turns, issued in one order, waited for in another, by ranks that are late at random."""
    group = RankGroup(dist.group.WORLD, rank, size, torch.device("cpu"))
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
        assert (first, end) == (rank, rank + 1) and torch.equal(mine[0], own)
        for theirs, first, end in comm.rows_of_others(received):
            assert torch.equal(theirs, rows[first:end])
        for sender, row in enumerate(rows):
            expected = value(sender, rank if number % 2 else 0, number)
            assert torch.equal(row, torch.full((width,), expected))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_row_comes_from_its_rank(ranks: int) -> None:
    run_on_ranks(ranks, many_in_flight, [1, 16, 100_000, 7, 0, 3, 250_000, 16, 1, 5])


def parts_of_one(rank: int, size: int) -> None:
    comm = Communicator(RankGroup.default("cpu"), LedgerKeeper(0), overlap=True)
    own = torch.arange(6.0)
    received = torch.empty(comm.rows_received * 6)
    comm.all_gather(received, own, "forward", ["unit"]).wait()
    (row,) = comm.rows_in_order(received, own)
    assert torch.equal(row, own)
    assert not comm.own_row(own) and not comm.rows_of_others(received), "there is nothing to copy"


def test_a_single_rank_has_its_own_row_alone() -> None:
    run_on_ranks(1, parts_of_one)


def test_a_loop_that_ends_with_gathers_in_flight_ends_in_peace() -> None:
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
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

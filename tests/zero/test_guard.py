"""The divergence guard: what ranks announce, what they find, and what they say."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool, run_on_ranks
from tests.zero.jobs import (
    Case,
    largest_difference,
    make_model,
    mean_loss,
    micro_batches,
    train_engine,
    train_plain,
)
from zerotune.config.knobs import Knobs
from zerotune.engine import LedgerKeeper, RankGroup, slots
from zerotune.engine.guard import CollectiveFailed, RanksDiverged
from zerotune.zero.comm import Communicator
from zerotune.zero.neighbours import SWITCH

# ------------------------------------------------------------------------------------------------------------- slots


def test_a_slot_holds_what_was_written_and_is_read_after_its_name_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    own = slots.SlotFile(path, create=True)
    other = slots.SlotFile(path)
    path.unlink()
    assert other.latest == 0 and other.entry(0) is None and other.entry(1) is None
    own.write(1, 2**55 + 3, slots.slot_text("gathers blocks.3"))
    own.mark_wait(1)
    entry = other.entry(1)
    assert entry is not None and (entry.digest, entry.text) == (2**55 + 3, "gathers blocks.3")
    assert abs(entry.time_s - time.time()) < 5
    assert (other.latest, other.waits_for, other.pid) == (1, 1, os.getpid())


def test_old_entries_give_way_to_new_ones(tmp_path: Path) -> None:
    own = slots.SlotFile(tmp_path / "slots", create=True)
    for number in range(1, 2 * slots.ENTRIES + 5):
        own.write(number, number, slots.slot_text("x" * 300))
    latest = 2 * slots.ENTRIES + 4
    assert own.digest(latest - slots.ENTRIES) is None
    assert [e.number for e in own.entries()] == list(range(latest - slots.ENTRIES + 1, latest + 1))
    assert own.entries(1)[0].text == "x" * 104


def test_writing_a_slot_is_cheap(tmp_path: Path) -> None:
    own = slots.SlotFile(tmp_path / "slots", create=True)
    text = slots.slot_text("gathers blocks.3 (forward, 4096 elements)")
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for number in range(1, 1001):
            own.write(number, number, text)
        best = min(best, time.perf_counter() - began)
    assert best / 1000 < 3e-6


# -------------------------------------------------------------------------------------- ranks that do different things


def own_group(rank: int, size: int, limit_s: float | None = None) -> tuple[RankGroup, Communicator]:
    """A process group that may be broken without harm to the session's."""
    group = RankGroup(dist.new_group(list(range(size))), rank, size, torch.device("cpu"))
    return group, Communicator(group, LedgerKeeper(rank), overlap=True, timeout_s=limit_s)


def gather(comm: Communicator, size: int, unit: str, elements: int) -> torch.Tensor:
    output = torch.empty(comm.rows_received * elements)
    comm.all_gather(output, torch.ones(elements), "forward", [unit]).wait()
    return output


def exchange(comm: Communicator, size: int, unit: str, elements: int) -> None:
    output = torch.empty(comm.rows_received * elements)
    comm.exchange(output, torch.ones(size * elements), "gradient", [unit]).wait()


def diverge(rank: int, size: int, how: str, nodes: int) -> tuple[str, float, str, str]:
    """Some collectives alike, then one that is not; returns what was raised, when, and what comes after it."""
    if nodes > 1:
        slots.this_node = lambda: f"node{rank % nodes}"  # type: ignore[assignment]
    group, comm = own_group(rank, size)
    assert comm.head_elements == 0, "on gloo what is sent is matched by number, and carries none"
    for number in range(3):
        gather(comm, size, f"blocks.{number}", 64)
    began = time.monotonic()
    last = rank == size - 1
    with pytest.raises(RanksDiverged) as caught:
        if how == "equal size":
            gather(comm, size, "tail" if last else "head", 64)
            gather(comm, size, "after", 64)
        elif how == "unequal size":
            gather(comm, size, "tail" if last else "head", 128 if last else 64)
        elif how == "other kind":
            exchange(comm, size, "tail", 64) if last else gather(comm, size, "head", 64)
        elif how == "one skips":
            if not last:
                gather(comm, size, "head", 64)
            group.gather_numbers([1.0])
        elif how == "one is late":
            time.sleep(1.5 * last)
            gather(comm, size, "tail" if last else "head", 64)
        elif how == "in flight":
            works = []
            for unit in ("x", "y", "tail" if last else "head", "z"):
                output = torch.empty(comm.rows_received * 8)
                works.append(comm.all_gather(output, torch.ones(8), "forward", [unit]))
            for work in works:
                work.wait()
    seconds = time.monotonic() - began
    assert comm.is_broken
    with pytest.raises(RanksDiverged) as again:
        gather(comm, size, "more", 64)
    doing = caught.value.doing
    return str(caught.value), seconds, str(again.value), doing.get(rank, "")


HOWS = ["equal size", "unequal size", "other kind", "one skips", "one is late", "in flight"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_differ_end_in_seconds_and_name_both(how: str, ranks: int) -> None:
    for message, seconds, again, doing in run_on_ranks(ranks, diverge, how, 1, limit=120):
        assert seconds < 10
        assert "gathers head (forward" in message
        assert ("numbers" if how == "one skips" else "tail") in message
        assert f"rank {ranks - 1} " in message and ("ranks 0, 1" if ranks == 3 else "rank 0 ") in message
        number = 6 if how == "in flight" else 4
        assert message.count(f"as collective {number}") == 2
        assert "leaf_modules" in message
        assert again == message
        assert "as collective" in doing


@pytest.mark.parametrize("how", ["equal size", "other kind"])
def test_between_nodes_tags_and_the_store_tell(how: str) -> None:
    pool = RankPool(2)
    try:
        for message, seconds, _, _ in pool.run(diverge, how, 2, limit=120):
            assert seconds < 12
            assert "gathers head (forward" in message or "never ran" in message
            assert "rank 0 " in message and "rank 1 " in message
    finally:
        pool.close(force=True)


def wait_for_a_slow_rank(rank: int, size: int) -> float:
    _, comm = own_group(rank, size)
    began = time.monotonic()
    time.sleep(1.2 * rank)
    gather(comm, size, "blocks.0", 64)
    return time.monotonic() - began


def test_a_slow_rank_is_waited_for() -> None:
    assert min(run_on_ranks(2, wait_for_a_slow_rank)) > 1


def wait_for_one_that_never_comes(rank: int, size: int) -> tuple[str, float]:
    _, comm = own_group(rank, size, limit_s=1.0)
    gather(comm, size, "blocks.0", 64)
    began = time.monotonic()
    if rank == 1:
        time.sleep(2.5)
        return "", 0.0
    with pytest.raises(CollectiveFailed, match="timed out") as caught:
        gather(comm, size, "head", 64)
    return str(caught.value), time.monotonic() - began


def test_a_time_limit_says_what_each_rank_did_last() -> None:
    message, seconds = run_on_ranks(2, wait_for_one_that_never_comes)[0]
    assert seconds < 3
    assert "rank 0 gathers head (forward, 128 elements) as collective 2, waiting for it" in message
    assert "rank 1 gathers blocks.0 (forward, 128 elements) as collective 1" in message


def lose_a_rank(rank: int, size: int, answer_file: str, near: bool) -> None:
    os.environ[SWITCH] = str(int(near))  # the pool ends with this task
    _, comm = own_group(rank, size)
    gather(comm, size, "blocks.0", 64)
    if rank == 1:
        time.sleep(0.3)
        os._exit(9)
    try:
        gather(comm, size, "head", 64)
    except CollectiveFailed as error:
        Path(answer_file).write_text(str(error))
    time.sleep(30)


@pytest.mark.parametrize("near", [True, False])
def test_who_loses_a_rank_says_what_it_did_last(near: bool, tmp_path: Path) -> None:
    pool = RankPool(2)
    answer = tmp_path / "answer"
    with pytest.raises(AssertionError, match="a rank died"):
        pool.run(lose_a_rank, str(answer), near, limit=120)
    message = answer.read_text()
    assert message.startswith("rank 1 ended during a collective")
    assert "rank 1 gathers blocks.0 (forward, 128 elements) as collective 1" in message


def use_and_end(rank: int, size: int) -> list[str]:
    own_group(rank, size)
    dist.barrier()
    prefix = slots.new_slot_path().name.rsplit("-", 1)[0]
    return [path.name for path in slots.new_slot_path().parent.iterdir() if path.name.startswith(prefix)]


def test_nothing_is_left_in_shared_memory() -> None:
    assert run_on_ranks(3, use_and_end) == [[], [], []]


# ------------------------------------------------------------------------------------------------------- with an engine


def train_between_nodes(rank: int, size: int, case: Case) -> Any:
    slots.this_node = lambda: f"node{rank}"  # type: ignore[assignment]
    return train_engine(rank, size, case), moved_between_nodes(rank, size)


def moved_between_nodes(rank: int, size: int) -> tuple[int, int, int]:
    import zerotune

    model = make_model("gpt")
    engine = zerotune.ZeroEngine(model, None, Knobs(param_persistence_threshold=0))
    for step in range(3):
        if step == 2:
            engine.begin_ledger()
        for x, y in micro_batches(rank, size, 1, step):
            engine.backward(mean_loss(engine(x), y))
        engine.step()
    ledger = engine.end_ledger()
    gathers = [e for e in ledger.collectives if e.purpose in ("forward", "backward")]
    (schedule,) = {s.digest: s for s in engine.schedules}.values()
    sums = sum(e.elements for e in gathers), schedule.gathered_elements(engine.layout)
    tags = sum(e.tag_bytes for e in ledger.collectives)
    assert ledger.peak_live_elements == schedule.peak_live
    engine.close()
    return *sums, tags


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_more_travels_between_nodes_than_within_one(precision: str) -> None:
    case = Case(steps=4, precision=precision, knobs={"allgather_bucket_size": 10_000})
    pool = RankPool(2)
    try:
        answers = pool.run(train_between_nodes, case, limit=120)
    finally:
        pool.close(force=True)
    for outcome, (moved, scheduled, tags) in answers:
        difference, where = largest_difference(outcome.state, train_plain(case).state)
        assert difference < (1e-5 if precision == "fp32" else 2e-2), where
        assert moved == scheduled
        assert tags == 0


def fail_inside_a_step(rank: int, size: int) -> tuple[str, int, float]:
    """A rank that runs the blocks in another order: the engine is cleaned, and does not hang, on every rank."""
    import zerotune

    group, _ = own_group(rank, size)
    model = make_model("gpt")
    knobs = Knobs(param_persistence_threshold=0, prefetch_distance=0)
    engine = zerotune.ZeroEngine(model, None, knobs, group=group)
    batches = list(micro_batches(rank, size, 1, 0))
    for x, y in batches:
        engine.backward(mean_loss(engine(x), y))
    engine.step()
    if rank == 1:
        first, second = model.blocks[0], model.blocks[1]
        model.blocks[0], model.blocks[1] = second, first
    began = time.monotonic()
    with pytest.raises(RanksDiverged) as caught:
        for x, y in batches:
            engine.backward(mean_loss(engine(x), y))
        engine.step()
    engine.flush()
    live = engine.ledger.live_elements
    engine.close()
    return str(caught.value), live, time.monotonic() - began


def test_an_engine_is_cleaned_after_ranks_diverged() -> None:
    for message, live, seconds in run_on_ranks(2, fail_inside_a_step, limit=120):
        assert "blocks.0" in message and "blocks.1" in message
        assert live == 0
        assert seconds < 10

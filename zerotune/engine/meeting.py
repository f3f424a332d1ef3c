"""Where ranks meet: collective calls that notice who is missing, and work whose outcome every rank learns.

[Note: one rank alone]
A collective that one rank enters alone waits for ever, or until a time-out half an hour away. So calls that every rank
must make, such as saving, begin with :func:`meet`: each rank leaves a word in the store of the process group, and goes
on when all words are there and are the same. Who waits too long says who is missing, and takes the meeting back, so
that a rank that comes later fails at once and the next call is in step again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from zerotune.config.errors import RunFailed, ZerotuneError
from zerotune.engine.group import RankGroup

T = TypeVar("T")

PATIENCE_S = float(os.environ.get("ZEROTUNE_PATIENCE", 20.0))
"""How long a rank waits for the others at the beginning of a collective call. They were together at the last step, so
only what a user's loop did since then can keep them apart; ``ZEROTUNE_PATIENCE`` sets another number of seconds."""

_TOGETHER = "together"


def meet(group: RankGroup, call: str) -> None:
    """Wait until every rank has made the same call.

    Args:
        group: The ranks.
        call: Its name, for the message.

    Raises:
        RunFailed: A rank did not come within :data:`PATIENCE_S`, or came with another call. Every rank that comes
            raises.
    """
    if group.process_group is None or group.size == 1 or group.backend == "fake":
        return
    try:
        verdict = _meet(_get_process_group_store(group.process_group), group, call)
    except dist.DistError as error:
        raise RunFailed(f"{call}: the ranks cannot reach one another: {first_line(error)}") from error
    if verdict != _TOGETHER:
        raise RunFailed(verdict, "every rank must make the same calls in the same order")


def _meet(store: Any, group: RankGroup, call: str) -> str:
    number = store.add(f"meeting/calls/{group.rank}", 1)
    place = f"meeting/{number}"
    store.set(f"{place}/{group.rank}", call)
    if store.add(f"{place}/arrived", 1) == group.size:
        calls = [store.get(f"{place}/{rank}").decode() for rank in range(group.size)]
        store.compare_set(f"{place}/verdict", "", _compare(calls))
        _forget(store, f"meeting/{number - 1}", group.size)
    deadline = time.monotonic() + PATIENCE_S
    pause = 0.0005
    while not store.check([f"{place}/verdict"]):
        if time.monotonic() > deadline:
            missing = [rank for rank in range(group.size) if not store.check([f"{place}/{rank}"])]
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            gave_up = f"{call}: rank {group.rank} waited {PATIENCE_S:g} s for {ranks}, which did not call it"
            store.compare_set(f"{place}/verdict", "", gave_up)
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    verdict: str = store.get(f"{place}/verdict").decode()
    return verdict


def _compare(calls: list[str]) -> str:
    for rank, call in enumerate(calls):
        if call != calls[0]:
            return f"rank 0 called {calls[0]} while rank {rank} called {call}"
    return _TOGETHER


def _forget(store: Any, place: str, ranks: int) -> None:
    """Remove a past meeting's words: who is at the next one has read them."""
    with suppress(RuntimeError, NotImplementedError):
        for key in ("arrived", "verdict", *map(str, range(ranks))):
            store.delete_key(f"{place}/{key}")


def on_rank_zero(group: RankGroup, what: str, act: Callable[[], T]) -> T:
    """Do something on rank 0 and let every rank know how it went, so that nobody waits for a rank that failed.

    Args:
        group: The ranks.
        what: For the message.
        act: What rank 0 does; its answer goes to every rank, so it must be picklable.

    Raises:
        ZerotuneError: What ``act`` raised, on every rank; :class:`RunFailed` for other exceptions.
    """
    if group.size == 1:
        error, answer = _attempt(what, act, 0, 1)
    else:
        outcome: list[Any] = [_attempt(what, act, 0, group.size) if group.rank == 0 else None]
        dist.broadcast_object_list(outcome, group_src=0, group=group.process_group)
        error, answer = outcome[0]
    if error is not None:
        raise error
    return answer


def together(group: RankGroup, what: str, act: Callable[[], T]) -> T:
    """Do something on every rank; if it fails on one, every rank raises that rank's error.

    Returns:
        This rank's own answer.
    """
    error, answer = _attempt(what, act, group.rank, group.size)
    if group.size > 1:
        errors: list[Any] = [None] * group.size
        dist.all_gather_object(errors, error, group=group.process_group)
        error = next((each for each in errors if each is not None), None)
    if error is not None:
        raise error
    return answer


def to_rank_zero(group: RankGroup, value: T) -> list[T] | None:
    """Every rank's value in rank order, on rank 0; ``None`` on the others."""
    if group.size == 1:
        return [value]
    values: list[Any] | None = [None] * group.size if group.rank == 0 else None
    dist.gather_object(value, values, group_dst=0, group=group.process_group)
    return values


def all_of(group: RankGroup, value: T) -> list[T]:
    """Every rank's value in rank order, on every rank; values must be picklable."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def from_rank_zero(group: RankGroup, values: list[T] | None) -> T:
    """Rank r's value of the list that rank 0 gives."""
    if group.size == 1:
        assert values is not None
        return values[0]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, values, group_src=0, group=group.process_group)
    answer: T = mine[0]
    return answer


def said_by_all(store: dist.Store, about: str, rank: int, size: int, word: Any) -> list[Any]:
    """Every rank's word in rank order, told through a store, for ranks that no collective connects yet; once per subject.

    Args:
        store: All of them see it.
        about: The subject.
        rank: This rank.
        size: The ranks.
        word: This rank's; JSON.
    """
    store.set(f"{about}/{rank}", json.dumps(word))
    return [json.loads(store.get(f"{about}/{other}")) for other in range(size)]


def agreed_by_both(store: dist.Store, about: str, rank: int, size: int, mine: Collection[int]) -> list[int]:
    """The ranks that this rank names, and that name it; afterwards everybody has answered.

    Args:
        store: All of them see it.
        about: The subject, as for :func:`said_by_all`.
        rank: This rank.
        size: The ranks.
        mine: Whom this rank names.
    """
    named = said_by_all(store, about, rank, size, list(mine))
    return [other for other in mine if rank in named[other]]


def _attempt(what: str, act: Callable[[], T], rank: int, ranks: int) -> tuple[ZerotuneError | None, Any]:
    try:
        return None, act()
    except ZerotuneError as error:
        return error, None
    except Exception as error:
        where = f" on rank {rank}" if ranks > 1 else ""
        failed = RunFailed(f"{what} failed{where}: {first_line(error)}")
        failed.__cause__ = error if ranks == 1 else None
        return failed, None


def first_line(error: BaseException) -> str:
    """The line of an exception's text that says most."""
    text = str(error).strip().splitlines()
    line = text[-1] if text else ""
    return line if isinstance(error, OSError) and line else f"{type(error).__name__}: {line}".rstrip(": ")

"""Collectives that have begun and not ended: what each still waits for, and who is told of its end.

Rows come and go one by one, by the hands of several threads; a collective has landed once every row that it awaits is
there and every row of this rank's has been taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Place(NamedTuple):
    """Where a row is, or a piece of one."""

    address: int
    nbytes: int


def place_of(tensor: torch.Tensor) -> Place:
    """Where a contiguous tensor is."""
    return Place(tensor.data_ptr(), tensor.nbytes)


def bytes_in(places: Iterable[Place]) -> int:
    """Of all pieces together."""
    return sum(place.nbytes for place in places)


def after(places: Iterable[Place], count: int) -> Iterator[Place]:
    """What is left of pieces behind their first ``count`` bytes."""
    for address, nbytes in places:
        if count < nbytes:
            yield Place(address + count, nbytes - count)
        count = max(count - nbytes, 0)


@dataclass(eq=False)
class Flight:
    """A collective under way.

    Attributes:
        places: Where rows that have not come yet go, piece by piece, by the rank they come from.
        takers: Ranks that have not taken theirs.
        landed: Called once, from any thread, at its end; with what went wrong, if something did.
        keep: The tensors that all this is in; they must stay until it has ended.
    """

    places: dict[int, Sequence[Place]]
    takers: set[int]
    landed: Callable[[BaseException | None], None]
    keep: tuple[torch.Tensor, ...]


class Flights:
    """The collectives of one group that some thread carries.

    Attributes:
        lock: Held for every change; never while ``landed`` is called.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._open: dict[int, Flight] = {}
        self._lost: list[tuple[torch.Tensor, ...]] = []
        self._closed_by: BaseException | None = None

    def begin(self, key: int, flight: Flight) -> BaseException | None:
        """Take one in, with the lock held.

        Args:
            key: 63 bits, the same for this collective on every rank, and of no other that is open.
            flight: What it waits for.

        Returns:
            Why nobody carries it; :meth:`end` must then be called with that.
        """
        assert key not in self._open
        self._open[key] = flight
        return self._closed_by

    @property
    def is_idle(self) -> bool:
        """Whether none is open."""
        return not self._open

    def get(self, key: int) -> Flight | None:
        """The one with this key, if this rank has come to it and it has not ended."""
        return self._open.get(key)

    def open_keys(self) -> list[int]:
        """Keys of all; with the lock held."""
        return list(self._open)

    def row_came(self, key: int, flight: Flight, rank: int) -> None:
        """The row of a rank is in its place."""
        with self.lock:
            flight.places.pop(rank, None)
            is_over = not flight.places and not flight.takers
        if is_over:
            self.end(key, flight, None)

    def row_left(self, key: int, flight: Flight, rank: int) -> None:
        """A rank has taken its row, or the kernel has for it."""
        with self.lock:
            flight.takers.discard(rank)
            is_over = not flight.places and not flight.takers
        if is_over:
            self.end(key, flight, None)

    def end(self, key: int, flight: Flight, error: BaseException | None) -> None:
        """It has landed, or failed; without the lock. Only the first call counts."""
        with self.lock:
            if self._open.get(key) is not flight:
                return
            del self._open[key]
            if error is not None:
                self._lost.append(flight.keep)  # for good: somebody may still read or write it
        flight.keep = ()  # let go of it before saying that it has landed
        flight.landed(error)

    def lose(self, rank: int) -> None:
        """A rank is gone: what waits for it will not end."""
        with self.lock:
            waiting = [(k, f) for k, f in self._open.items() if rank in f.places or rank in f.takers]
        self._fail(waiting, RuntimeError(f"Connection closed by rank {rank}"))

    def close(self, error: BaseException) -> None:
        """Nobody carries any more: what is open fails, and so does what comes."""
        with self.lock:
            self._closed_by = self._closed_by or error
            waiting = list(self._open.items())
        self._fail(waiting, error)

    def _fail(self, flights: Iterable[tuple[int, Flight]], error: BaseException) -> None:
        for key, flight in flights:
            self.end(key, flight, error)

"""A thread that brings rows between this rank and some others: how it begins, is woken, fails and ends."""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from zerotune.zero.flights import Flights, Place

_EXIT_S = 3.0
"""How long what is open may take once nobody waits for it: the next step's first gathers, which all ranks have issued."""

MOST_PIECES = 512
"""Of a row, at most: the kernel takes 1024 at a time, and a message to a neighbour holds as many addresses."""

LOOK_S = 0.1
"""How often a thread that is to end looks whether it may."""


class Carrier(ABC):
    """Brings rows from and to some ranks of a group.

    Args:
        name: Of the thread.
        ranks: Whom it reaches; for nobody there is no thread.
    """

    def __init__(self, name: str, ranks: Collection[int]) -> None:
        self.ranks = ranks
        self._name = name
        self._flights = Flights()
        self._ends = False
        self._ends_at: float | None = None
        if ranks:
            self._woken, self._waker = socket.socketpair()
            self._woken.setblocking(False)
            self._waker.setblocking(False)

    @abstractmethod
    def exchange(
        self,
        key: int,
        sources: Mapping[int, Sequence[Place]],
        places: Mapping[int, Sequence[Place]],
        keep: tuple[torch.Tensor, ...],
        landed: Callable[[BaseException | None], None],
    ) -> int:
        """Give a row to every one of some ranks, and get one from each; waits for nothing.

        Args:
            key: 63 bits, the same for this collective on every rank, and of no other that is open.
            sources: Where the row is that each gets, in pieces, at most ``MOST_PIECES``; of as many bytes as its own
                place has.
            places: Where each one's row goes, in pieces, which need not be those in which it is sent.
            keep: The tensors that these are in.
            landed: Called, perhaps from another thread, once all have come and gone, or with what went wrong.

        Returns:
            Bytes of them that need not be sent.
        """

    @abstractmethod
    def _serve(self) -> None:
        """What the thread does, until :meth:`_is_over`."""

    @abstractmethod
    def _hang_up(self) -> None:
        """Close the connections; nothing is open any more."""

    def end(self) -> None:
        """Hang up, once what is open has ended, or soon in any case; waits for nothing."""
        atexit.unregister(self._end_and_join)
        self._end()

    def _start(self) -> None:
        """Start the thread, once all is there that it needs."""
        if self.ranks:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            atexit.register(self._end_and_join, thread)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._waker.send(b"w")

    def _is_over(self) -> bool:
        """Whether the thread is to end now: nothing is open, or it has waited long enough."""
        if not self._ends:
            return False
        self._ends_at = self._ends_at or time.monotonic() + _EXIT_S
        return self._flights.is_idle or time.monotonic() > self._ends_at

    def _was_woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _run(self) -> None:
        error: BaseException = RuntimeError("the group has ended")
        try:
            self._serve()
        except BaseException as failure:  # whatever it is, those who wait must hear of it
            error = RuntimeError(f"the thread {self._name} failed: {failure!r}")
        finally:
            self._flights.close(error)
            self._hang_up()
            self._woken.close()
            self._waker.close()

    def _end(self) -> None:
        self._ends = True
        if self.ranks:
            self._wake()

    def _end_and_join(self, thread: threading.Thread) -> None:
        """At exit: what this rank began with the others, it ends with them."""
        self._end()
        thread.join(2 * _EXIT_S)

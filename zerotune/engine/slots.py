"""What each rank is doing, in shared memory: one line per collective, written before it is issued.

[Note: slots]
Every rank has a small memory-mapped file with a ring of its latest collectives; ranks of one node map one another's.
Files lose their name as soon as everybody on the node has opened them, so nothing is left behind however processes end,
and what a rank wrote can be read after its death. Writing is a few stores into the map. An entry's number is stored
last, so whoever finds it finds the rest; a reader that is about to draw conclusions looks twice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ENTRIES = 256
"""Collectives remembered per rank: far more than are ever in flight at once."""

_ENTRY = 128  # bytes: number, digest, time in ns, 104 bytes of text
_HEADER = 64  # bytes: number of the latest, number of the one waited for, process id
_SIZE = _HEADER + ENTRIES * _ENTRY
_TEXT = _ENTRY - 24
_WORD = 8


@dataclass(frozen=True)
class Entry:
    """One collective as a rank announced it.

    Attributes:
        number: Its number in the order of issue, the same on every rank that runs the same.
        digest: Hash of which collective it is, of which units, for what, of which size.
        text: The same in words, cut to fit.
        time_s: When, by the clock of its node.
    """

    number: int
    digest: int
    text: str
    time_s: float


class SlotFile:
    """The slots of one rank, mapped.

    Args:
        path: Where the file is.
        create: Whether it is this rank's own.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        handle = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(handle, _SIZE)
            self._map = mmap.mmap(handle, _SIZE, access=mmap.ACCESS_WRITE if create else mmap.ACCESS_READ)
        finally:
            os.close(handle)
        self.words = memoryview(self._map).cast("Q")
        if create:
            self.words[2] = os.getpid()

    def write(self, number: int, digest: int, text: bytes) -> None:
        """Announce a collective.

        Args:
            number: Above the last one's.
            digest: As in :class:`Entry`.
            text: From :func:`slot_text`.
        """
        start = _HEADER + number % ENTRIES * _ENTRY
        word = start // _WORD
        words = self.words
        words[word + 1] = digest
        words[word + 2] = time.time_ns()
        self._map[start + 24 : start + _ENTRY] = text
        words[word] = number
        words[0] = number

    def mark_wait(self, number: int) -> None:
        """Say which collective this rank waits for; 0 for none."""
        self.words[1] = number

    @property
    def latest(self) -> int:
        """Number of the latest collective; 0 before the first."""
        return self.words[0]

    @property
    def waits_for(self) -> int:
        return self.words[1]

    @property
    def pid(self) -> int:
        return self.words[2]

    def digest(self, number: int) -> int | None:
        """Digest of a collective, or ``None`` if this rank has not come to it (or has long passed it)."""
        word = word_of(number)
        return self.words[word + 1] if self.words[word] == number else None

    def entry(self, number: int) -> Entry | None:
        """A collective, or ``None`` as for :meth:`digest`."""
        digest = self.digest(number)
        if digest is None or number == 0:
            return None
        start = _HEADER + number % ENTRIES * _ENTRY
        text = self._map[start + 24 : start + _ENTRY].rstrip(b"\0").decode(errors="replace")
        return Entry(number, digest, text, self.words[word_of(number) + 2] / 1e9)

    def entries(self, count: int = ENTRIES) -> list[Entry]:
        """The latest collectives, oldest first."""
        latest = self.latest
        found = (self.entry(number) for number in range(max(1, latest - count + 1), latest + 1))
        return [entry for entry in found if entry is not None]


def word_of(number: int) -> int:
    """Index of an entry's first word, which holds its number; the next holds its digest."""
    return (_HEADER + number % ENTRIES * _ENTRY) // _WORD


def slot_text(text: str) -> bytes:
    """Text as a slot holds it."""
    return text.encode()[:_TEXT].ljust(_TEXT, b"\0")


def new_slot_path() -> Path:
    """A name nobody has, in shared memory where there is such a folder."""
    shared = Path("/dev/shm")
    folder = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"zerotune-{os.getpid()}-{os.urandom(4).hex()}"


def unlink(paths: Iterable[str]) -> None:
    """Take files' names away; maps stay readable."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def sweep(folder: Path, older_than_s: float = 60.0) -> None:
    """Remove files whose process was killed before everybody had opened them."""
    for path in folder.glob("zerotune-*-*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            is_old = time.time() - path.stat().st_mtime > older_than_s
            if is_old and path.stat().st_uid == os.getuid() and not is_alive(int(path.name.split("-")[1])):
                path.unlink()


def this_node() -> str:
    """What processes that can map one another's files have in common."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat(new_slot_path().parent).st_dev}/{os.uname().nodename}"
    return os.uname().nodename


def is_alive(pid: int) -> bool:
    """Whether a process of this node still runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return not Path("/proc/self/stat").exists()
    return stat.rsplit(")", 1)[-1].split()[:1] not in (["Z"], ["X"])

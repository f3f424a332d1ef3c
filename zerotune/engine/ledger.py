"""Keeping the ledger: the one place that counts bytes by class and logs collectives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerotune.models.marks import is_profiled, mark
from zerotune.records import (
    ByteClass,
    ByteSample,
    CollectiveEntry,
    CollectiveKind,
    Ledger,
    ReleaseEntry,
    UseEntry,
)

BEGIN_MARK = "zerotune::ledger"
BYTES_MARK = "zerotune::bytes "
"""In a profile every change of a class that is recorded has a mark: this, the class, and its bytes from then on."""
TAKEN_MARK = "zerotune::taken "
"""The same where memory that others allocated is the ledger's from then on: this, and its address."""


@dataclass(slots=True)
class PendingCollective:
    """A collective from its issue to the end of the wait for it; times are those of the clock, for it may be issued
    before recording begins. Of ``sent_bytes`` so many are left out."""

    sequence: int
    kind: CollectiveKind
    purpose: str
    units: tuple[str, ...]
    elements: int
    sent_bytes: int
    issued_s: float
    waited_s: float = 0.0
    tag_bytes: int = 0
    left_out_bytes: int = 0


class LedgerKeeper:
    """Counts always; keeps the history only while recording, as whoever tells it of waits, uses and releases asks first: that
    is cheaper than a call.

    Args:
        rank: The rank whose ledger it is.

    Attributes:
        is_recording: Whether the history is kept.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._bytes = dict.fromkeys(ByteClass, 0)
        self._peak = dict.fromkeys(ByteClass, 0)
        self._at_rest: dict[ByteClass, int] = {}
        self._sequence = 0
        self.is_recording = False
        self._begun_s = 0.0
        self._entries: list[CollectiveEntry] = []
        self._samples: list[ByteSample] = []
        self._uses: list[UseEntry] = []
        self._open_uses: list[tuple[str, str, float]] = []
        self._releases: list[ReleaseEntry] = []
        self.live_elements = 0
        self.peak_live_elements = 0
        self.collectives = 0
        self.sent_elements = 0
        self.broadcasts = 0

    def bytes(self, byte_class: ByteClass) -> int:
        """Bytes of a class that are alive now."""
        return self._bytes[byte_class]

    @property
    def totals(self) -> dict[ByteClass, int]:
        return dict(self._bytes)

    def add(self, byte_class: ByteClass, change: int) -> None:
        """Count bytes that were allocated (positive) or freed (negative)."""
        if not change:
            return
        now = self._bytes[byte_class] + change
        assert now >= 0, f"ledger: {byte_class} would fall below zero"
        self._bytes[byte_class] = now
        if now > self._peak[byte_class]:
            self._peak[byte_class] = now
        if self.is_recording:
            self._samples.append(ByteSample(time_s=self._now(), byte_class=byte_class, bytes=now))
            if is_profiled():
                with mark(f"{BYTES_MARK}{byte_class} {now}"):
                    pass

    def take(self, byte_class: ByteClass, tensors: Sequence[torch.Tensor]) -> None:
        """Count from now on what somebody else allocated: each is all of its memory."""
        self.add(byte_class, sum(tensor.nbytes for tensor in tensors))
        if self.is_recording and is_profiled():
            for tensor in tensors:
                with mark(f"{TAKEN_MARK}{tensor.untyped_storage().data_ptr()}"):
                    pass

    def add_live(self, elements: int) -> None:
        """Count elements of full parameters that became or ceased to be live."""
        self.live_elements += elements
        if self.live_elements > self.peak_live_elements:
            self.peak_live_elements = self.live_elements

    def issue(
        self,
        kind: CollectiveKind,
        purpose: str,
        units: Sequence[str],
        elements: int,
        sent: int,
        itemsize: int,
    ) -> PendingCollective:
        """Log the issue of a collective.

        Args:
            kind: Which.
            purpose: What for.
            units: Names of the units it carries.
            elements: Elements of the full, padded tensor.
            sent: Elements that this rank sends.
            itemsize: Bytes per element on the wire.
        """
        self._sequence += 1
        self.collectives += 1
        self.sent_elements += sent
        if kind is CollectiveKind.BROADCAST:
            self.broadcasts += 1
        return PendingCollective(
            self._sequence, kind, purpose, tuple(units), elements, sent * itemsize, time.perf_counter()
        )

    def begin_wait(self, pending: PendingCollective) -> None:
        pending.waited_s = time.perf_counter()

    def end_wait(self, pending: PendingCollective) -> None:
        """While recording: a collective's result is there for whoever waited."""
        self._entries.append(
            CollectiveEntry(
                sequence=pending.sequence,
                kind=pending.kind,
                purpose=pending.purpose,
                units=pending.units,
                elements=pending.elements,
                sent_bytes=pending.sent_bytes - pending.left_out_bytes,
                left_out_bytes=pending.left_out_bytes,
                tag_bytes=pending.tag_bytes,
                issued_s=pending.issued_s - self._begun_s,
                waited_s=pending.waited_s - self._begun_s,
                done_s=self._now(),
            )
        )

    def begin_use(self, phase: str, scope: str) -> None:
        """While recording: a module begins to use units that are complete."""
        self._open_uses.append((scope, phase, self._now()))

    def end_use(self, phase: str, scope: str) -> None:
        """While recording: its latest use of that phase ends."""
        now = self._now()
        for position in range(len(self._open_uses) - 1, -1, -1):
            if self._open_uses[position][:2] == (scope, phase):
                begun = self._open_uses.pop(position)[2]
                self._uses.append(UseEntry(scope=scope, phase=phase, begin_s=begun, end_s=now))
                return

    def release(self, unit: str) -> None:
        """While recording: a unit's full parameters were freed."""
        self._releases.append(ReleaseEntry(unit=unit, time_s=self._now()))

    def begin(self) -> None:
        """Start recording; peaks and counts begin anew."""
        self.is_recording = True
        self._begun_s = time.perf_counter()
        with mark(BEGIN_MARK):
            pass
        self._entries = []
        self._samples = []
        self._uses = []
        self._open_uses = []
        self._releases = []
        self._at_rest = dict(self._bytes)
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Begin peaks and counts anew."""
        self._peak = dict(self._bytes)
        self.peak_live_elements = self.live_elements
        self.collectives = 0
        self.sent_elements = 0

    def end(self) -> Ledger:
        """Stop recording and hand out what was recorded."""
        self.is_recording = False
        return Ledger(
            rank=self._rank,
            collectives=sorted(self._entries, key=lambda entry: entry.sequence),
            samples=self._samples,
            at_rest=self._at_rest,
            peak=dict(self._peak),
            peak_live_elements=self.peak_live_elements,
            uses=self._uses,
            releases=self._releases,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._begun_s

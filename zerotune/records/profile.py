"""What was measured of a step, so that other schedules of the same step can be predicted."""

from __future__ import annotations

from pydantic import Field

from zerotune.records.base import Record


class Link(Record):
    """What communication costs.

    Attributes:
        latency_s: Seconds of a collective that carries nothing.
        seconds_per_byte: More for every byte that a rank sends of it.
        handled_s_per_byte: Seconds of compute for every byte that is copied out of a gather buffer, or into or out of
            a reduce bucket.
        stolen_s_per_byte: Seconds by which compute takes longer for every byte that a rank sends beside it: on a
            CPU, what the threads that carry it take from the core.
    """

    latency_s: float = Field(0.0, ge=0)
    seconds_per_byte: float = Field(0.0, ge=0)
    handled_s_per_byte: float = Field(0.0, ge=0)
    stolen_s_per_byte: float = Field(0.0, ge=0)


class PassProfile(Record):
    """One kind of pass, with the schedule that it followed when it was measured.

    Between two events something is computed; at an event the schedule's actions are carried out.

    Attributes:
        order: Digest of its trace.
        count: Passes of this kind in one step.
        compute_s: For each event, the seconds from the end of its actions to the next event.
        acting_bytes: For each event, the most bytes that the allocator held during its actions.
        computing_bytes: The same from there to the next event; after the last one, to the end of the step.
    """

    order: str
    count: int
    compute_s: tuple[float, ...]
    acting_bytes: tuple[int, ...] = ()
    computing_bytes: tuple[int, ...] = ()


class Profile(Record):
    """One step, agreed upon by all ranks: the slowest rank's compute, the largest rank's bytes.

    Attributes:
        step_s: Seconds of the whole step.
        link: What communication costs.
        passes: The kinds of passes in it.
        gather_itemsize: Bytes of an element that is gathered.
        reduce_itemsize: Bytes of an element that is reduced.
        overlaps: Whether communication runs beside compute.
        left_out: For every unit, the share of its reductions' bytes that is zeros and does not travel; empty for none.
        gathered_rows: Rows that a gather has a buffer for: those of all ranks (``None``), or of all others.
        copies_gradients: Whether gradients are copied into a bucket; otherwise they are sent from where they are.
    """

    step_s: float
    link: Link
    passes: tuple[PassProfile, ...]
    gather_itemsize: int = 4
    reduce_itemsize: int = 4
    overlaps: bool = True
    left_out: tuple[float, ...] = ()
    gathered_rows: int | None = None
    copies_gradients: bool = True

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the allocator held; 0 if that was not measured."""
        return max((held for p in self.passes for held in (*p.acting_bytes, *p.computing_bytes)), default=0)

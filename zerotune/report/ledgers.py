"""The ledgers of a step in a few lines: which collectives, how much they moved, what was waited for."""

from __future__ import annotations

from collections.abc import Sequence

from zerotune.records import ByteClass, CollectiveKind, Ledger
from zerotune.records.base import Record


class CollectiveSummary(Record):
    """All collectives of one kind and purpose in one step.

    Attributes:
        kind: Which collective.
        purpose: What for.
        count: How many, on one rank.
        elements: Elements of the full tensors that they assembled or reduced, on one rank.
        sent_bytes: Bytes sent, by the rank that sent most.
        exposed_s: Seconds that the step stood still for them, on the rank where it was longest.
        left_out_bytes: Bytes that need not be sent, for they are zeros, of the rank that has fewest.
    """

    kind: CollectiveKind
    purpose: str
    count: int
    elements: int
    sent_bytes: int
    exposed_s: float
    left_out_bytes: int = 0


class LedgerSummary(Record):
    """A step over all ranks.

    Attributes:
        ranks: Number of ledgers.
        collectives: By kind and purpose, in the order of their first issue.
        peak_live_elements: The largest over ranks.
        at_rest: Bytes by class before the step, the largest over ranks.
        peak: Largest bytes by class within the step, over ranks.
    """

    ranks: int
    collectives: list[CollectiveSummary]
    peak_live_elements: int
    at_rest: dict[ByteClass, int]
    peak: dict[ByteClass, int]


def summarise(ledgers: Sequence[Ledger]) -> LedgerSummary | None:
    """Sum up the ledgers of one step; ``None`` if there are none."""
    if not ledgers:
        return None
    by_rank = [_by_purpose(ledger) for ledger in ledgers]
    keys = dict.fromkeys(key for each in by_rank for key in each)
    return LedgerSummary(
        ranks=len(ledgers),
        collectives=[_slowest([each[key] for each in by_rank if key in each]) for key in keys],
        peak_live_elements=max(ledger.peak_live_elements for ledger in ledgers),
        at_rest=_largest([ledger.at_rest for ledger in ledgers]),
        peak=_largest([ledger.peak for ledger in ledgers]),
    )


def _by_purpose(ledger: Ledger) -> dict[tuple[CollectiveKind, str], CollectiveSummary]:
    found: dict[tuple[CollectiveKind, str], CollectiveSummary] = {}
    for entry in ledger.collectives:
        key = (entry.kind, entry.purpose)
        before = found.get(key)
        found[key] = CollectiveSummary(
            kind=entry.kind,
            purpose=entry.purpose,
            count=1 + (before.count if before else 0),
            elements=entry.elements + (before.elements if before else 0),
            sent_bytes=entry.sent_bytes + (before.sent_bytes if before else 0),
            exposed_s=max(0.0, entry.done_s - entry.waited_s) + (before.exposed_s if before else 0.0),
            left_out_bytes=entry.left_out_bytes + (before.left_out_bytes if before else 0),
        )
    return found


def _slowest(ranks: Sequence[CollectiveSummary]) -> CollectiveSummary:
    return ranks[0].model_copy(
        update={
            "sent_bytes": max(each.sent_bytes for each in ranks),
            "exposed_s": max(each.exposed_s for each in ranks),
            "left_out_bytes": min(each.left_out_bytes for each in ranks),
        }
    )


def _largest(ranks: Sequence[dict[ByteClass, int]]) -> dict[ByteClass, int]:
    return {name: amount for name in ByteClass if (amount := max(each.get(name, 0) for each in ranks))}

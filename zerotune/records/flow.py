"""What the collectives of one step cost: hidden beside compute, or exposed.

Exposed is what a collective was waited for; hidden is the time between its issue and that wait, in which it ran beside
compute (or was long done).
"""

from __future__ import annotations

from collections.abc import Sequence

from zerotune.records.base import Record
from zerotune.records.ledger import CollectiveEntry, Ledger

_TITLES = {
    "forward": "AllGather in forward",
    "backward": "AllGather in backward",
    "access": "AllGather on access",
    "gradient": "ReduceScatter",
    "refresh": "persistent refresh",
}

_LONGEST = 3


class Flow(Record):
    """All collectives of one purpose in one step: times are those of the rank that stood still longest for them, bytes those
    of the rank that sent most (ranks differ in what they leave out).

    Attributes:
        title: In words.
        purpose: As the ledger has it.
        count: How many.
        sent_bytes: What that rank sent.
        left_out_bytes: What it need not send, for it was zeros.
        exposed_s: What the step stood still for.
        hidden_s: What ran beside compute.
        longest: The collectives that were waited for longest: units and seconds.
    """

    title: str
    purpose: str
    count: int
    sent_bytes: int
    exposed_s: float
    hidden_s: float
    longest: list[tuple[str, float]]
    left_out_bytes: int = 0


def flows_of(ledgers: Sequence[Ledger]) -> list[Flow]:
    """The flows of a step that these ledgers, one per rank, recorded, in the order of their first collectives."""
    purposes = dict.fromkeys(entry.purpose for ledger in ledgers for entry in ledger.collectives)
    return [_over_ranks([_flow(ledger, purpose) for ledger in ledgers]) for purpose in purposes]


def _over_ranks(flows: Sequence[Flow]) -> Flow:
    most = max(flows, key=lambda flow: flow.sent_bytes)
    bytes_of_most = {"sent_bytes": most.sent_bytes, "left_out_bytes": most.left_out_bytes}
    return max(flows, key=lambda flow: flow.exposed_s).model_copy(update=bytes_of_most)


def exposed_s(entry: CollectiveEntry) -> float:
    """Seconds that a step stood still for a collective."""
    return max(0.0, entry.done_s - entry.waited_s)


def _flow(ledger: Ledger, purpose: str) -> Flow:
    entries = [entry for entry in ledger.collectives if entry.purpose == purpose]
    longest = sorted(entries, key=exposed_s, reverse=True)[:_LONGEST]
    return Flow(
        title=_TITLES.get(purpose, purpose),
        purpose=purpose,
        count=len(entries),
        sent_bytes=sum(entry.sent_bytes for entry in entries),
        left_out_bytes=sum(entry.left_out_bytes for entry in entries),
        exposed_s=sum(map(exposed_s, entries)),
        hidden_s=sum(max(0.0, entry.waited_s - entry.issued_s) for entry in entries),
        longest=[(", ".join(entry.units[:3]), exposed_s(entry)) for entry in longest],
    )

"""A step as a Chrome trace: opens in Perfetto (ui.perfetto.dev) and in chrome://tracing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from zerotune.records import CollectiveEntry, CollectiveKind, Ledger

_THREADS = {CollectiveKind.ALL_GATHER: "AllGather", CollectiveKind.REDUCE_SCATTER: "ReduceScatter"}


def chrome_trace(ledgers: Sequence[Ledger]) -> dict[str, Any]:
    """A process for each rank, with threads for compute, AllGather and ReduceScatter, and a counter of bytes by class.

    Collectives that overlap stand on further threads of the same name, for slices of one thread must nest.
    """
    return {"displayTimeUnit": "ms", "traceEvents": [event for ledger in ledgers for event in _rank(ledger)]}


def _rank(ledger: Ledger) -> list[dict[str, Any]]:
    rank = ledger.rank
    events: list[dict[str, Any]] = [_name("process_name", rank, 0, f"rank {rank}")]
    events.append(_name("thread_name", rank, 1, "compute"))
    events += [
        _slice(rank, 1, f"{use.scope} {use.phase}", use.phase, use.begin_s, use.end_s, {})
        for use in ledger.uses
    ]
    events += [
        {
            "ph": "i",
            "s": "t",
            "name": f"release {entry.unit}",
            "pid": rank,
            "tid": 1,
            "ts": entry.time_s * 1e6,
        }
        for entry in ledger.releases
    ]
    number = 2
    for kind in CollectiveKind:
        for lane in _lanes([entry for entry in ledger.collectives if entry.kind is kind]):
            events.append(_name("thread_name", rank, number, _THREADS.get(kind, kind.value)))
            events += [_collective(rank, number, entry) for entry in lane]
            number += 1
    totals: dict[str, int] = {name.value: amount for name, amount in ledger.at_rest.items()}
    events.append(_counter(rank, 0.0, totals))
    for sample in ledger.samples:
        totals[sample.byte_class.value] = sample.bytes
        events.append(_counter(rank, sample.time_s, totals))
    return events


def _lanes(entries: Sequence[CollectiveEntry]) -> list[list[CollectiveEntry]]:
    """Entries dealt out so that those of one lane do not overlap."""
    lanes: dict[int, list[CollectiveEntry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: entry.issued_s):
        free = next((n for n, lane in lanes.items() if lane[-1].done_s <= entry.issued_s), len(lanes))
        lanes[free].append(entry)
    return list(lanes.values())


def _collective(rank: int, thread: int, entry: CollectiveEntry) -> dict[str, Any]:
    details = {
        "units": ", ".join(entry.units),
        "elements": entry.elements,
        "sent_bytes": entry.sent_bytes,
        "left_out_bytes": entry.left_out_bytes,
        "exposed_ms": max(0.0, entry.done_s - entry.waited_s) * 1e3,
    }
    name = f"{entry.purpose} {', '.join(entry.units[:2])}"
    return _slice(rank, thread, name, entry.purpose, entry.issued_s, entry.done_s, details)


def _slice(
    rank: int, thread: int, name: str, category: str, begin_s: float, end_s: float, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": rank, "tid": thread, "ts": begin_s * 1e6,
        "dur": max(0.0, end_s - begin_s) * 1e6, "args": details,
    }  # fmt: skip


def _counter(rank: int, time_s: float, totals: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": "bytes", "pid": rank, "tid": 0, "ts": time_s * 1e6, "args": dict(totals)}


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}

"""A Chrome trace has every collective once, on threads whose slices do not overlap."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from zerotune.records import Ledger
from zerotune.report.chrome_trace import chrome_trace

LEDGER = Ledger.model_validate_json(
    (Path(__file__).parents[2] / "docs" / "figures" / "step.json").read_text()
)


def test_everything_recorded_is_in_the_trace() -> None:
    other = LEDGER.model_copy(update={"rank": 1})
    events = json.loads(json.dumps(chrome_trace([LEDGER, other])))["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {"compute", "AllGather", "ReduceScatter"}
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert len(slices) == len(LEDGER.uses) + len(LEDGER.collectives)
    assert sum(e["args"].get("sent_bytes", 0) for e in slices) == sum(
        e.sent_bytes for e in LEDGER.collectives
    )
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert len(counters) == len(LEDGER.samples) + 1
    assert counters[-1]["args"]["full"] == 0
    assert sum(e["ph"] == "i" for e in events) == 2 * len(LEDGER.releases)


def test_collectives_of_one_thread_do_not_overlap() -> None:
    lanes = defaultdict(list)
    for event in chrome_trace([LEDGER])["traceEvents"]:
        if event["ph"] == "X" and event["tid"] > 1:
            lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) >= 2
    for slices in lanes.values():
        slices.sort()
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(slices))

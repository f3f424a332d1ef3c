"""Planted faults are named first, each with its knob; a healthy step has no finding. Ledgers are drawn by hand."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from zerotune.records import (
    ByteClass,
    ByteSample,
    CollectiveEntry,
    CollectiveKind,
    Ledger,
    ReleaseEntry,
    UseEntry,
)
from zerotune.report.explain import explain
from zerotune.report.explain_text import explanation_parts
from zerotune.report.format import sent
from zerotune.report.printing import print_whole

COMPUTE_S = 0.010
GATHER_S = 0.004
UNITS = [f"blocks.{number}" for number in range(4)]


@dataclass
class Step:
    """How a step went.

    Attributes:
        prefetched: Whether a gather is issued one unit ahead.
        released: Whether a unit is freed after its use, not at the end.
        reduced_late: Whether all gradients are reduced after backward.
        delay_s: What this rank computes longer per use.
        waits_s: What this rank waits longer for every gather, for another that is slow.
        elements: Of the first unit; the others have 1000.
    """

    prefetched: bool = True
    released: bool = True
    reduced_late: bool = False
    delay_s: float = 0.0
    waits_s: float = 0.0
    elements: int = 1000


def ledger(step: Step, rank: int = 0) -> Ledger:
    collectives: list[CollectiveEntry] = []
    samples: list[ByteSample] = []
    uses: list[UseEntry] = []
    releases: list[ReleaseEntry] = []
    now = full = 0.0

    def note(change: float) -> None:
        nonlocal full
        full += change
        samples.append(ByteSample(time_s=now, byte_class=ByteClass.FULL, bytes=int(full)))

    def collective(
        kind: CollectiveKind, purpose: str, unit: str, elements: int, issued: float, done: float
    ) -> None:
        collectives.append(
            CollectiveEntry(
                sequence=len(collectives) + 1, kind=kind, purpose=purpose, units=(unit,), elements=elements,
                sent_bytes=2 * elements, issued_s=issued, waited_s=now, done_s=max(now, done),
            )
        )  # fmt: skip

    order = [("forward", unit) for unit in UNITS] + [("backward", unit) for unit in reversed(UNITS)]
    issued = [0.0] * len(order)
    for number, (phase, unit) in enumerate(order):
        elements = step.elements if unit == UNITS[0] else 1000
        if not step.prefetched or number == 0:
            issued[number] = now
        done = issued[number] + GATHER_S + step.waits_s
        collective(CollectiveKind.ALL_GATHER, phase, unit, elements, issued[number], done)
        now = max(now, done)
        note(4 * elements)
        if step.prefetched and number + 1 < len(order):
            issued[number + 1] = now
        begun = now
        now += COMPUTE_S + step.delay_s
        uses.append(UseEntry(scope=unit, phase=phase, begin_s=begun, end_s=now))
        if step.released:
            releases.append(ReleaseEntry(unit=unit, time_s=now))
            note(-4 * elements)
        if phase == "backward" and not step.reduced_late:
            collectives.append(
                CollectiveEntry(
                    sequence=len(collectives) + 1, kind=CollectiveKind.REDUCE_SCATTER, purpose="gradient", units=(unit,),
                    elements=elements, sent_bytes=2 * elements, issued_s=now, waited_s=now + 0.009, done_s=now + 0.009,
                )
            )  # fmt: skip
    if step.reduced_late:
        issued_s = now
        for unit in UNITS:
            now += 0.006
            collectives.append(
                CollectiveEntry(
                    sequence=len(collectives) + 1, kind=CollectiveKind.REDUCE_SCATTER, purpose="gradient", units=(unit,),
                    elements=1000, sent_bytes=2000, issued_s=issued_s, waited_s=now - 0.006, done_s=now,
                )
            )  # fmt: skip
    return Ledger(
        rank=rank,
        collectives=collectives,
        samples=samples,
        at_rest={ByteClass.SHARD: 8000, ByteClass.OPTIMIZER: 16000},
        peak={ByteClass.FULL: max(sample.bytes for sample in samples), ByteClass.GRADIENT: 4000},
        peak_live_elements=2000,
        uses=uses,
        releases=releases,
    )


def test_a_healthy_step_has_no_finding() -> None:
    found = explain([ledger(Step(), 0), ledger(Step(), 1)])
    assert found is not None and found.findings == []


@pytest.mark.parametrize(
    ("steps", "words", "knob"),
    [
        ([Step(prefetched=False)] * 2, "gathers are not hidden at all", "prefetch_distance"),
        ([Step(released=False)] * 2, "full parameters lie idle", "release: after_use"),
        ([Step(reduced_late=True)] * 2, "reduced at the very end", "reduce_bucket_size"),
        ([Step(waits_s=0.02), Step(delay_s=0.02)], "rank 1 is slow", "that rank's node"),
        ([Step(elements=50_000)] * 2, "one unit is huge: blocks.0", "unit_size"),
    ],
)
def test_a_planted_fault_is_the_first_finding(steps: list[Step], words: str, knob: str) -> None:
    found = explain([ledger(step, rank) for rank, step in enumerate(steps)])
    assert found is not None
    assert words in found.findings[0].text
    assert knob in found.findings[0].remedy


def test_zeros_that_did_not_travel_are_named() -> None:
    whole = ledger(Step())
    entries = [
        entry.model_copy(update={"sent_bytes": 0, "left_out_bytes": 3 * 2**20})
        if entry.purpose == "gradient"
        else entry
        for entry in whole.collectives
    ]
    found = explain([whole.model_copy(update={"collectives": entries})])
    assert found is not None
    count = sum(entry.purpose == "gradient" for entry in entries)
    texts = {flow.purpose: sent(flow.sent_bytes, flow.left_out_bytes) for flow in found.flows}
    assert texts["gradient"] == f"0 B, {3 * count}.0 MiB of zeros left out"
    assert "zeros" not in texts["forward"]


def test_figures_are_the_ledgers() -> None:
    found = explain([ledger(Step(prefetched=False))])
    assert found is not None
    forward = next(flow for flow in found.flows if flow.purpose == "forward")
    assert forward.count == 4 and forward.sent_bytes == 8000
    assert forward.exposed_s == pytest.approx(4 * GATHER_S) and forward.hidden_s == pytest.approx(0)
    assert found.peak.bytes == 8000 + 16000 + 4000 == sum(found.peak.classes.values())
    assert not found.peak.is_allocators
    assert found.peak.complete == ["blocks.0"]
    assert found.step_s == pytest.approx(8 * (COMPUTE_S + GATHER_S) + 0.009)
    # Prefetched, all but the first gather is hidden.
    hidden = explain([ledger(Step())])
    assert hidden is not None
    assert sum(f.exposed_s for f in hidden.flows) == pytest.approx(GATHER_S)


def test_what_nobody_uses_any_more_is_counted_until_its_release() -> None:
    found = explain([ledger(Step(released=False))])
    assert found is not None
    last = next(held for held in found.held if held.unit == "blocks.3")
    # Its backward is the first of four; it is freed with the step's end.
    assert last.idle_byte_s == pytest.approx(last.idle_s * 4000)
    assert last.idle_s > 2 * COMPUTE_S


def test_it_can_be_read() -> None:
    found = explain([ledger(Step(prefetched=False), 0), ledger(Step(prefetched=False), 1)])
    assert found is not None
    file = io.StringIO()
    console = Console(file=file, width=120)
    for part in explanation_parts(found):
        if part is not None:
            print_whole(console, part) if hasattr(part, "columns") else console.print(part)
    text = file.getvalue()
    for words in (
        "1. gathers are not hidden at all", "Which shards are resident at rest?", "AllGather in forward", "ReduceScatter",
        "Are full parameters released soon", "the ranks hold equally much",
    ):  # fmt: skip
        assert words in text


def test_without_ledgers_there_is_nothing_to_explain() -> None:
    assert explain([]) is None

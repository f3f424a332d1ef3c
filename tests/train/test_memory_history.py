"""Every byte of a step has a class: what autograd saves, gradients, temporaries, the engine's own; little is left over."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import run_on_ranks
from tests.train.contexts import FakeContext, make_job, make_spec
from tests.train.plain_engine import PlainEngine
from zerotune.models.marks import FORWARD, mark
from zerotune.records import ByteClass, Ledger
from zerotune.train.memory import allocation_peak
from zerotune.train.memory_history import Allocation, Event, history, profiled_step
from zerotune.train.run import run
from zerotune.train.spec import RankReport, RunSpec

CPU = torch.device("cpu")
EMPTY = Ledger(rank=0, collectives=[], samples=[], at_rest={}, peak={}, peak_live_elements=0)


class Silent(PlainEngine):
    """Without a ledger of its own."""

    def begin_ledger(self) -> None:
        pass

    def end_ledger(self) -> Ledger:
        return EMPTY


def test_saved_tensors_gradients_and_temporaries_are_told_apart() -> None:
    linear = torch.nn.Linear(1000, 10, bias=False)
    engine = Silent(linear, lambda groups: torch.optim.SGD(groups, lr=0.1))
    x = torch.ones(500, 1000)

    def step() -> None:
        with mark(FORWARD):
            hidden = x * 2  # saved for the weight's gradient
            loss = (
                linear(hidden).exp().sum()
            )  # what exp saves is gone when that gradient is made, its gradient is not
        engine.backward(loss)

    found = profiled_step(engine, CPU, step)
    assert sum(found.at_peak.values()) == found.peak_bytes
    assert found.at_peak[ByteClass.SHARD] == 40_000
    assert found.at_peak[ByteClass.ACTIVATION] == 2_000_000
    assert found.at_peak[ByteClass.TEMPORARY] == pytest.approx(20_000, abs=100)
    assert found.at_peak[ByteClass.GRADIENT] == 40_000
    assert {"aten::mul", "MmBackward0"} <= {each.operation for each in found.operations}
    assert found.backward_s is not None and found.peak_s > found.backward_s


def test_a_model_that_forbids_hooks_on_saved_tensors_is_profiled_without() -> None:
    linear = torch.nn.Linear(10, 10, bias=False)
    engine = Silent(linear, lambda groups: torch.optim.SGD(groups, lr=0.1))

    def step() -> None:
        with mark(FORWARD):
            per_sample = torch.func.grad(lambda x: (x * x).sum())(torch.ones(10))
            loss = linear(per_sample).sum()
        engine.backward(loss)

    found = profiled_step(engine, CPU, step)
    assert ByteClass.ACTIVATION not in found.at_peak
    assert sum(found.at_peak.values()) == found.peak_bytes


def run_rank(rank: int, size: int, spec: RunSpec) -> RankReport:
    return run(FakeContext(rank=rank, world_size=size), spec)


@pytest.mark.parametrize(
    ("knobs", "train"),
    [
        ({}, {}),
        ({"release": "keep", "prefetch_distance": 10**6}, {}),
        ({"stage": 1}, {}),
        ({}, {"activation_checkpointing": "full"}),
        ({}, {"accumulate": "local", "micro_batch_size": 1}),
        ({}, {"precision": "bf16"}),
        ({"reduce_bucket_size": 10**9}, {"precision": "bf16"}),
    ],
)
def test_the_peak_is_explained_whatever_the_knobs(knobs, train) -> None:
    model = {"gpt": {"layers": 4, "d_model": 128, "heads": 2, "vocab_size": 512, "sequence_length": 64}}
    job = make_job(model, global_batch_size=8, **train)
    job = job.model_copy(update={"zero": job.zero.model_copy(update=knobs)})
    spec = make_spec(job, min_steps=2, max_steps=2, warmup_steps=2)
    for report in run_on_ranks(2, run_rank, spec, limit=150):
        found = report.ledger.memory
        assert sum(found.at_peak.values()) == found.peak_bytes
        assert report.measurement.memory[report.rank].peak == found.peak_bytes
        assert abs(found.at_peak.get(ByteClass.OTHER, 0)) < 0.03 * found.peak_bytes, found.at_peak
        assert found.at_peak[ByteClass.ACTIVATION] > 0
        assert max(sum(point.bytes.values()) for point in found.points) <= found.peak_bytes
        for point in found.points:
            assert min(point.bytes.values()) >= 0 or ByteClass.OTHER in point.bytes


def test_hooks_leave_the_peak_as_it_is() -> None:
    job = make_job(
        {"gpt": {"layers": 2, "d_model": 64, "heads": 2, "vocab_size": 512, "sequence_length": 64}}
    )
    peaks = [
        run(FakeContext(), make_spec(job, min_steps=2, max_steps=2, record_ledger=recorded)).measurement.memory[0].peak
        for recorded in (True, False)
    ]  # fmt: skip
    assert abs(peaks[0] - peaks[1]) < 100


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Allocations of the model and of an engine that counts its own at once."""
    events: list[Event] = []
    alive: list[Allocation] = []
    counted = 0
    for time_s in range(draw(st.integers(1, 30))):
        if alive and draw(st.booleans()):
            gone = alive.pop(draw(st.integers(0, len(alive) - 1)))
            events.append(Event(float(time_s), freed=gone))
            change = -gone.bytes if gone.byte_class is None else 0
        else:
            kind = draw(st.sampled_from([None, ByteClass.ACTIVATION, ByteClass.TEMPORARY]))
            new = Allocation(draw(st.integers(1, 100)), kind)
            alive.append(new)
            events.append(Event(float(time_s), allocated=new))
            change = new.bytes if kind is None else 0
        if change:
            counted += change
            events.append(Event(time_s + 0.5, counted=(ByteClass.FULL, counted)))
    return events


@given(histories())
def test_classes_add_up_to_the_largest_sum(events: list[Event]) -> None:
    found = history(events, 1000, {ByteClass.SHARD: 1000}, EMPTY, 4)
    total = best = 0
    for event in events:
        total += event.allocated.bytes if event.allocated else 0
        total -= event.freed.bytes if event.freed else 0
        best = max(best, total)
    assert found.peak_bytes == 1000 + best == sum(found.at_peak.values())
    assert ByteClass.OTHER not in found.at_peak


def test_a_free_that_is_not_seen_is_believed_to_the_ledger() -> None:
    """The thread that communicates let go of the first buffer, and the profiler did not see it."""
    first, second = Allocation(100, is_free_unseen=True), Allocation(50)
    events = [
        Event(0.0, allocated=first), Event(1.0, counted=(ByteClass.FULL, 100)), Event(2.0, counted=(ByteClass.FULL, 0)),
        Event(2.5, begins_backward=True), Event(3.0, allocated=second), Event(4.0, counted=(ByteClass.FULL, 50)),
    ]  # fmt: skip
    assert history(events, 0, {}, EMPTY, 4).peak_bytes == 100


def test_what_the_engine_takes_is_counted_once() -> None:
    """A gradient that the ledger counts from some moment on, beside a byte that nobody explains."""
    unknown, gradient = Allocation(50), Allocation(100, ByteClass.GRADIENT, is_taken=True)
    events = [
        Event(0, allocated=unknown),
        Event(1, allocated=gradient),
        Event(2, counted=(ByteClass.GRADIENT, 100)),
        Event(3, taken=gradient),
        Event(4, allocated=Allocation(7)),
    ]
    found = history(events, 1000, {ByteClass.SHARD: 1000}, EMPTY, 4)
    assert found.peak_bytes == 1157
    assert found.at_peak == {ByteClass.SHARD: 1000, ByteClass.GRADIENT: 100, ByteClass.OTHER: 57}
    events += [Event(5, freed=gradient), Event(6, counted=(ByteClass.GRADIENT, 0))]
    last = history(events, 1000, {ByteClass.SHARD: 1000}, EMPTY, 4).points[-1]
    assert {name: amount for name, amount in last.bytes.items() if amount} == {
        ByteClass.SHARD: 1000, ByteClass.OTHER: 57,
    }  # fmt: skip


def test_the_profile_agrees_with_the_running_sum_of_allocations() -> None:
    def step() -> None:
        with mark(FORWARD):
            kept = [torch.empty(1000) for _ in range(3)]
            kept.pop()
            torch.empty(500)

    engine = Silent(torch.nn.Linear(1, 1), lambda groups: torch.optim.SGD(groups, lr=0.1))
    rest = sum(engine.at_rest().values())
    assert profiled_step(engine, CPU, step).peak_bytes - rest == allocation_peak(step)

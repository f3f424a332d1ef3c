import gc

import pytest
import torch

from tests.train.plain_engine import PlainEngine
from zerotune.engine.group import RankGroup
from zerotune.train.memory import (
    allocation_peak,
    bytes_in_use,
    memory_use,
    of_all_ranks,
    reset_peaks,
    resident_peak,
)

CPU = torch.device("cpu")
MIB = 2**20


def test_peak_of_known_allocations_is_exact():
    before = torch.empty(10_000)

    def work() -> None:
        a = torch.empty(1000)  # 4000 alive
        b = torch.empty(2000, dtype=torch.float64)  # 20000
        del a  # 16000
        c = torch.empty(500, dtype=torch.int64)  # 20000 again
        del b  # 4000
        d = torch.empty(15_000, dtype=torch.uint8)  # 19000
        del c, d

    gc.collect()
    gc.disable()
    try:
        assert allocation_peak(work) == 20_000
        assert allocation_peak(lambda: None) == 0
    finally:
        gc.enable()
    del before


def test_frees_of_what_was_there_before_are_not_seen():
    held = [torch.empty(10_000)]

    def work() -> None:
        held.clear()
        torch.empty(1000)

    assert allocation_peak(work) == 4000


def test_backward_is_seen():
    weight = torch.zeros(1000, 1000, requires_grad=True)
    peak = allocation_peak(lambda: (weight * 2).sum().backward())
    assert 4_000_000 <= peak < 4_000_000 + 1000  # the gradient of the weight; the product is gone by then


def engine() -> PlainEngine:
    return PlainEngine(torch.nn.Linear(1000, 10, bias=False), lambda groups: torch.optim.SGD(groups, lr=0.1))


def test_memory_use_adds_what_rests_and_the_steps_peak():
    use = memory_use(engine(), CPU, lambda: allocation_peak(lambda: torch.empty(1000)))
    assert (use.at_rest, use.peak, use.peak_allocated) == (40_000, 44_000, 44_000)
    assert use.resident_peak > 10 * MIB and use.peak_live_elements == 10_000
    assert of_all_ranks(use, RankGroup.default("cpu")) == [use]


def test_without_a_profile_the_peak_is_the_resident_one():
    use = memory_use(engine(), CPU, None)
    assert use.peak == use.resident_peak


def test_resident_peak_can_begin_anew():
    reset_peaks(CPU)
    before = resident_peak()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    assert resident_peak() - before >= 60 * MIB
    del block
    reset_peaks(CPU)
    if resident_peak() >= before + 60 * MIB:
        pytest.skip("this kernel does not let a process reset its peak")
    assert abs(resident_peak() - bytes_in_use(CPU)) < 16 * MIB

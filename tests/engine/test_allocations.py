"""The most bytes held in every interval between two marks."""

from __future__ import annotations

import gc

import torch

from zerotune.engine.allocations import allocation_recorder


def test_every_interval_has_its_own_peak() -> None:
    recorder = allocation_recorder(torch.device("cpu"), at_rest=100)
    gc.collect()
    gc.disable()
    try:
        recorder.start()
        first = torch.empty(1000)  # 4000
        recorder.mark()
        second = torch.empty(500)  # 6000
        del first  # 2000
        recorder.mark()
        recorder.mark()
        third = torch.empty(10)  # 2040
        del second, third
        assert recorder.stop() == [4100, 6100, 2100, 2140]
    finally:
        gc.enable()


def test_without_marks_there_is_one_interval() -> None:
    recorder = allocation_recorder(torch.device("cpu"), at_rest=0)
    recorder.start()
    assert recorder.stop() == [0]

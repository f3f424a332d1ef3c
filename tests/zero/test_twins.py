"""The tests for a device, on the CPU as far as it can run them, so that they hold on the day there is a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.zero import test_gpu


@pytest.mark.parametrize(
    "on_device",
    [
        test_gpu.test_fp32_equals_the_plain_loop,
        test_gpu.test_bf16_equals_the_plain_loop,
        test_gpu.test_knobs_do_not_change_a_bit_in_bf16,
        test_gpu.test_knobs_do_not_change_a_bit_on_two_ranks,
        test_gpu.test_released_parameters_leave_the_device,
    ],
    ids=lambda test: test.__name__,
)
def test_also_holds_here(on_device: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_gpu, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**60)  # the CPU does not count
    on_device()


@pytest.mark.parametrize("knobs", [{}, test_gpu.SMALL], ids=str)
def test_twins_train_alike_whatever_is_gathered_together(knobs: dict[str, object]) -> None:
    found = []
    for each in (knobs, {"release": "keep"}):
        with test_gpu.twins(torch.device("cpu")) as group:
            engine = test_gpu.engine_on(group, **each)
            found.append([test_gpu.take_step(engine, step) for step in range(4)])
            assert sum(map(len, (schedule.gathers() for schedule in engine.schedules))) > 0
            engine.close()
    assert found[0] == found[1]

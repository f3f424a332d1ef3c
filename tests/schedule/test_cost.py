"""Compiling takes a number of operations that grows with the model, not with its square."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.schedule.strategies import plain_trace
from zerotune.config.knobs import Knobs
from zerotune.schedule import Layout, ParamSize, UnitSize, compile_schedule, resolve_knobs

NUMEL = 1000


def model(units: int) -> Layout:
    """Units of two parameters of 1000 elements."""
    return Layout(
        tuple(
            UnitSize(f"u{i}", tuple(ParamSize(f"u{i}.p{j}", NUMEL) for j in range(2)), is_block=True)
            for i in range(units)
        ),
        ranks=2,
    )


def lines_run(function: Callable[[], object]) -> int:
    """Lines of Python that a call runs: operations, whatever the clock says."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"prefetch_distance": 10**9},
        {"allgather_bucket_size": 10**9, "prefetch_distance": 50 * NUMEL},
        {"release": "keep"},
        {"release": "keep", "max_live_parameters": 40 * NUMEL},
        {"release": "reuse", "max_reuse_distance": 10**9},
        {"release": "reuse", "max_reuse_distance": 10**9, "max_live_parameters": 40 * NUMEL},
        {"reduce_bucket_size": NUMEL},
    ],
    ids=str,
)
def test_it_grows_linearly(knobs: dict[str, object]) -> None:
    def lines(units: int) -> int:
        layout = model(units)
        trace = plain_trace(units)
        resolved = resolve_knobs(Knobs(param_persistence_threshold=0, **knobs), layout.largest_block)
        return lines_run(lambda: compile_schedule(trace, resolved, layout))

    small, large = lines(200), lines(400)
    assert large < 2.2 * small  # a square would give 4

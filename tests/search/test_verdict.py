"""What a search says in the end."""

from __future__ import annotations

import pytest

from tests.builders import MIB, make_confirmed, make_run
from zerotune.records import Interval
from zerotune.records.events import SearchResult
from zerotune.search.verdict import verdict

PEAKS = {"base": 64, "lean": 50, "fat": 80}


def result(ratios: dict[str, float], spread: float = 0.04, *, fits: bool = True) -> SearchResult:
    """A search whose winner is the first of ``ratios``."""
    trials = [
        make_run(
            name,
            peak_memory_bytes=peak * MIB,
            is_baseline=name == "base",
            number=number,
            feasible=name != "base" or fits,
        )
        for number, (name, peak) in enumerate(PEAKS.items())
    ]
    confirmed = [
        make_confirmed(name, ratio, 0.0 if name == "base" else spread) for name, ratio in ratios.items()
    ]
    best = next(run for run in trials if run.run_id == next(iter(ratios)))
    speedup = confirmed[0].speedup if fits else None
    return SearchResult(
        study="demo",
        counts={"complete": 3},
        baseline=trials[0],
        best=best,
        reference=None if fits else "lean",
        speedup=speedup,
        is_tie=speedup is not None and speedup.overlaps(Interval(value=1, low=1, high=1)),
        confirmed=confirmed,
        trials=trials,
        ended_because="trials",
        wall_seconds=1.0,
        executed=3,
    )


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        (
            {"fat": 1.2, "base": 1.0, "lean": 0.9},
            "best: run fat, 1.200x [1.154, 1.248] of the baseline's speed in 8 rounds in turns (95 % interval)",
        ),
        (
            {"lean": 1.2, "fat": 1.22, "base": 1.0},
            "best: run lean, 1.200x [1.154, 1.248] of the baseline's speed in 8 rounds in turns (95 % interval);"
            " run fat makes 1.220x [1.173, 1.269], a tie with it that takes more memory, 80.0 MiB against 50.0 MiB",
        ),
        (
            {"lean": 0.99, "base": 1.0},
            "a tie with the defaults: run lean makes 0.990x [0.952, 1.030] of the baseline's speed in 8 rounds in"
            " turns, which is inside the noise; chosen for its smaller peak memory, 50.0 MiB against 64.0 MiB",
        ),
        (
            {"lean": 1.02, "fat": 1.05, "base": 1.0},
            "a tie with the defaults: run lean makes 1.020x [0.981, 1.061] of the baseline's speed in 8 rounds in"
            " turns, which is inside the noise; run fat makes 1.050x [1.010, 1.092], a tie with it that takes more"
            " memory, 80.0 MiB against 50.0 MiB",
        ),
        ({"base": 1.0, "lean": 0.8}, "the defaults are the fastest of what was tried (run base)"),
        (
            {"base": 1.0, "fat": 1.01},
            "the defaults are as fast as anything that was tried, within the noise (run base)",
        ),
    ],
)
def test_by_throughput(ratios: dict[str, float], said: str) -> None:
    assert verdict(result(ratios), "throughput") == said


def test_by_memory() -> None:
    assert verdict(result({"lean": 0.8, "base": 1.0}), "memory") == (
        "smallest peak memory: run lean, 50.0 MiB against the defaults' 64.0 MiB, at 0.800x [0.769, 0.832] of"
        " their speed in 8 rounds in turns"
    )
    assert "takes less memory than the defaults, 64.0 MiB" in verdict(result({"base": 1.0}), "memory")


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_defaults_that_do_not_fit_are_no_denominator(objective: str) -> None:
    line = verdict(result({"fat": 1.2, "lean": 1.0}, fits=False), objective)
    assert "the defaults failed or do not fit" in line and "x [" not in line

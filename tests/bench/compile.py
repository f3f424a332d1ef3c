"""How long a schedule takes to compile, and how that grows with the model.

    python -m tests.bench.compile [--units 10000]

Times are the processor's. A trace of forward and backward over units of two parameters, as recorded in a first step. The bar: under 1 s for 10 000
units, growing linearly (``tests/schedule/test_cost.py`` counts the operations).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

from tests.schedule.strategies import plain_trace
from tests.schedule.test_cost import NUMEL, model
from zerotune.config.knobs import Knobs
from zerotune.schedule import compile_schedule, resolve_knobs

SETTINGS: dict[str, dict[str, object]] = {
    "defaults": {},
    "keep": {"release": "keep"},
    "keep, bounded": {"release": "keep", "max_live_parameters": 200 * NUMEL},
    "reuse": {"release": "reuse", "max_reuse_distance": 10**9},
    "far ahead": {"prefetch_distance": 100 * NUMEL, "allgather_bucket_size": 50 * NUMEL},
}
SHARES = (0.1, 0.2, 0.5, 1.0)
RUNS = 3


def seconds(units: int, setting: dict[str, object]) -> tuple[float, float]:
    """To compile, and to hash what was compiled: the best of a few runs."""
    layout, trace = model(units), plain_trace(units)
    knobs = resolve_knobs(Knobs(param_persistence_threshold=0, **setting), layout.largest_block)
    compiling, hashing = [], []
    for _ in range(RUNS):
        started = time.process_time()
        schedule = compile_schedule(trace, knobs, layout)
        compiled = time.process_time()
        _ = schedule.digest
        compiling.append(compiled - started)
        hashing.append(time.process_time() - compiled)
    return min(compiling), min(hashing)


def exponent(sizes: list[int], times: list[float]) -> float:
    """Slope of time over size, both logarithmic: 1 is linear."""
    return statistics.linear_regression([math.log(n) for n in sizes], [math.log(t) for t in times]).slope


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=10_000)
    options = parser.parse_args()
    sizes = [int(options.units * share) for share in SHARES]
    print(f"{'':14s}" + "".join(f"{size:>12,}" for size in sizes) + "   growth     digest")
    for name, setting in SETTINGS.items():
        found = [seconds(size, setting) for size in sizes]
        compiling = [each[0] for each in found]
        print(
            f"{name:14s}"
            + "".join(f"{spent:10.3f} s" for spent in compiling)
            + f"   n^{exponent(sizes, compiling):.2f}   {found[-1][1]:6.3f} s"
        )


if __name__ == "__main__":
    main()

"""The ratio of two figures that were measured apart."""

from __future__ import annotations

import math

from zerotune.records import Interval


def unpaired_ratio(over: Interval, under: Interval) -> Interval:
    """``over / under`` with its interval.

    The half-widths of the logarithms add as squares, each side by itself. A ratio that was measured in turns is
    narrower and is preferred where there is one.
    """
    if min(over.value, over.low, under.value, under.low) <= 0:
        value = over.value / under.value if under.value else math.inf
        return Interval(value=value, low=0.0, high=math.inf)
    down = math.hypot(math.log(over.value / over.low), math.log(under.high / under.value))
    up = math.hypot(math.log(over.high / over.value), math.log(under.value / under.low))
    value = over.value / under.value
    return Interval(value=value, low=value * math.exp(-down), high=value * math.exp(up))

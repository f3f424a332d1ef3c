"""What communication costs, from the seconds that the actions of a step took when nothing ran beside them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import StatisticsError, linear_regression

from zerotune.predict.replay import EventLoad
from zerotune.records import Link


def fit_link(loads: Sequence[EventLoad], alone_s: Sequence[float], stolen_s: float = 0.0) -> Link:
    """Find latency, rate and the cost of copying.

    Events that issue no collective show what copying costs; of the others, what is left is latency and bytes.

    Args:
        loads: What the actions of each event did.
        alone_s: For each event, seconds that its actions took while compute stood still.
        stolen_s: Seconds by which all compute together took longer beside the same communication.

    Returns:
        Costs of at least 0. Where all collectives are of one size, latency is not to be told from rate, and is 0.
    """
    copies = [
        (load.handled_bytes, s)
        for load, s in zip(loads, alone_s, strict=True)
        if load.handled_bytes and not load.collectives
    ]
    # A sum, not a median: of the small ones most is the time of a call.
    handled = sum(s for _, s in copies) / sum(nbytes for nbytes, _ in copies) if copies else 0.0
    sizes, seconds = [], []
    for load, s in zip(loads, alone_s, strict=True):
        if load.collectives:
            sizes.append(load.sent_bytes / load.collectives)
            seconds.append(max(s - handled * load.handled_bytes, 0.0) / load.collectives)
    latency, per_byte = _line(sizes, seconds)
    sent = sum(load.sent_bytes for load in loads)
    return Link(
        latency_s=latency,
        seconds_per_byte=per_byte,
        handled_s_per_byte=handled,
        stolen_s_per_byte=max(stolen_s, 0.0) / sent if sent else 0.0,
    )


def _line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, of seconds over sizes."""
    if not any(sizes):
        return 0.0, 0.0
    try:
        slope, intercept = linear_regression(sizes, seconds)
    except StatisticsError:  # one size only
        slope, intercept = 0.0, -1.0
    if slope < 0:
        return sum(seconds) / len(seconds), 0.0
    if intercept < 0:
        return 0.0, sum(seconds) / sum(sizes)
    return intercept, slope

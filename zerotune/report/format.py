"""Figures as text. Binary units for memory, plain digits for knobs, so that they can be copied into a file."""

from __future__ import annotations

from enum import Enum

import humanize

from zerotune.records import Interval

MISSING = "-"


def number(value: float | None) -> str:
    """``4,123``; with digits after the point below 100."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.2f}"


def number_interval(interval: Interval | None) -> str:
    """``4,123 [4,100, 4,150]``."""
    if interval is None:
        return MISSING
    return f"{number(interval.value)} {bounds(interval)}"


def bounds(interval: Interval) -> str:
    """``[4,100, 4,150]``."""
    return f"[{number(interval.low)}, {number(interval.high)}]"


def milliseconds(seconds: float | None) -> str:
    """``248.1`` for 0.2481 s."""
    return MISSING if seconds is None else f"{seconds * 1000:,.1f}"


def memory(amount: float | None) -> str:
    """``512.3 MiB``."""
    if amount is None:
        return MISSING
    return f"{amount:.0f} B" if amount < 1024 else humanize.naturalsize(amount, binary=True, format="%.1f")


def sent(sent_bytes: int, left_out_bytes: int) -> str:
    """``0.3 MiB, 3.7 MiB of zeros left out``."""
    left_out = f", {memory(left_out_bytes)} of zeros left out" if left_out_bytes else ""
    return f"{memory(sent_bytes)}{left_out}"


def change(ratio: Interval | None) -> str:
    """A ratio as a change: ``+12.3 % [10.1, 14.6]``, and ``tie`` after it where the interval contains no change."""
    if ratio is None:
        return MISSING
    value, low, high = ((x - 1) * 100 for x in (ratio.value, ratio.low, ratio.high))
    text = f"{value:+.1f} % [{low:.1f}, {high:.1f}]"
    return f"{text} tie" if ratio.low <= 1 <= ratio.high else text


def factor(ratio: Interval) -> str:
    """A ratio as a factor: ``1.123x [1.101, 1.146]``."""
    return f"{ratio.value:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]"


def duration(seconds: float | None) -> str:
    """``0.25 s``, ``45 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds is None:
        return MISSING
    if seconds < 10:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def eta(seconds: float | None) -> str:
    """``ETA 45 s``, in whole seconds; empty where nothing is known."""
    if seconds is None:
        return ""
    return f"ETA {duration(seconds) if seconds >= 10 else f'{seconds:.0f} s'}"


def setting(value: object) -> str:
    """A value of a configuration as one writes it in model.yaml."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case Enum():
            return str(value.value)
        case _:
            return str(value)


def count(amount: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"

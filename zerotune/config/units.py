"""Quantities as users write them: elements, bytes and durations.

Sizes of parameters and buckets are in *elements* (``5e7``, ``50M``); memory is in *bytes* (``512MiB``, ``4GB``).
Each refuses the other's suffix, because a bucket of "50MB" silently read as elements is four times too large.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator

_NUMBER = r"(?P<number>[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
_QUANTITY = re.compile(rf"^\s*{_NUMBER}\s*(?P<suffix>[A-Za-z]*)\s*$", re.ASCII)

_ELEMENT_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BYTE_SUFFIXES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"": "1", "s": "1", "sec": "1", "ms": "0.001", "m": "60", "min": "60", "h": "3600", "d": "86400"}

LARGEST = 10**18
"""Largest size that is read; more is a slip of the exponent."""


def _split(value: object, what: str, example: str) -> tuple[Decimal, str]:
    """Split ``'512MiB'`` into ``(512, 'mib')``; numbers pass with an empty suffix.

    Decimal, because 1.005 times a million is not a whole number in binary.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number, suffix = Decimal(repr(value)), ""
    elif isinstance(value, str) and (match := _QUANTITY.match(value)):
        number, suffix = Decimal(match["number"].replace("_", "")), match["suffix"].lower()
    else:
        raise ValueError(f"{value!r} is not {what}; write for example {example}")
    if not number.is_finite():
        raise ValueError(f"{value!r} is not a finite number; write for example {example}")
    if number < 0:
        raise ValueError(f"{value!r} is negative; write for example {example}")
    if number and abs(number.adjusted()) > 40:
        raise ValueError(
            f"{value!r} is too {'large' if number.adjusted() > 0 else 'small'}; write for example {example}"
        )
    return number, suffix


def _whole(number: Decimal, value: object, what: str) -> int:
    if number > LARGEST:
        raise ValueError(f"{value!r} is too large; the limit is 1e18")
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number of {what}")
    return int(number)


def parse_elements(value: object) -> int:
    """Read a number of parameter elements.

    Args:
        value: A number, or text such as ``5e7``, ``50M``, ``1.5B``.

    Returns:
        Whole number of elements, at least 0.

    Raises:
        ValueError: Not a number, negative, fractional, or with a suffix of bytes.
    """
    number, suffix = _split(value, "a number of elements", "5e7 or 50M")
    if suffix not in _ELEMENT_SUFFIXES:
        if suffix in _BYTE_SUFFIXES:
            raise ValueError(f"{value!r} is in bytes, but this is in elements; write for example 5e7 or 50M")
        raise ValueError(f"{value!r} has an unknown suffix; elements are written as 5e7 or 50M")
    return _whole(number * _ELEMENT_SUFFIXES[suffix], value, "elements")


def parse_bytes(value: object) -> int:
    """Read an amount of memory.

    Args:
        value: A number of bytes, or text such as ``512MiB``, ``40GB``, ``5e8``.

    Returns:
        Whole number of bytes, at least 0; a fraction of a byte, as in ``0.3GiB``, is rounded down.

    Raises:
        ValueError: Not a number, negative, a fraction without a suffix, or with a suffix of elements.
    """
    number, suffix = _split(value, "an amount of memory", "512MiB or 40GiB")
    if suffix and suffix not in _BYTE_SUFFIXES:
        if suffix in _ELEMENT_SUFFIXES:
            raise ValueError(
                f"{value!r} is in elements, but this is in bytes; write for example 512MiB or 40GiB"
            )
        raise ValueError(f"{value!r} has an unknown suffix; memory is written as 512MiB or 40GiB")
    if len(suffix) > 1:
        number = Decimal(int(number * _BYTE_SUFFIXES[suffix]))
    return _whole(number, value, "bytes")


def parse_duration(value: object) -> float:
    """Read a duration in seconds from a number or from text such as ``90s``, ``10m``, ``2h``.

    Raises:
        ValueError: Not a number, negative, or an unknown suffix.
    """
    number, suffix = _split(value, "a duration", "90s or 10m")
    if suffix not in _SECONDS:
        raise ValueError(f"{value!r} has an unknown suffix; durations are written as 90s, 10m or 2h")
    return float(number * Decimal(_SECONDS[suffix]))


Elements = Annotated[int, BeforeValidator(parse_elements)]
"""A number of parameter elements, read by :func:`parse_elements`."""

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
"""An amount of memory in bytes, read by :func:`parse_bytes`."""

Duration = Annotated[float, BeforeValidator(parse_duration)]
"""A duration in seconds, read by :func:`parse_duration`."""

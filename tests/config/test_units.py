"""Quantities: what is written is what is read, and each kind refuses the other's suffix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.config.units import parse_bytes, parse_duration, parse_elements


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (5e7, 50_000_000),
        ("5e7", 50_000_000),
        ("50M", 50_000_000),
        ("50 m", 50_000_000),
        ("1.5B", 1_500_000_000),
        ("1.005M", 1_005_000),
        ("1_000k", 1_000_000),
        (0, 0),
        (2**53 + 1, 2**53 + 1),
    ],
)
def test_elements(written: object, read: int) -> None:
    assert parse_elements(written) == read


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("512MiB", 512 * 2**20),
        ("40GB", 40 * 10**9),
        ("5e8", 500_000_000),
        ("1.5gib", 3 * 2**29),
        ("0.3KiB", 307),
        ("7B", 7),
    ],
)
def test_bytes(written: object, read: int) -> None:
    assert parse_bytes(written) == read


@pytest.mark.parametrize(
    ("written", "read"),
    [("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("250ms", 0.25), (1.5, 1.5), ("1d", 86400.0)],
)
def test_durations(written: object, read: float) -> None:
    assert parse_duration(written) == read


@pytest.mark.parametrize(
    ("parse", "written", "says"),
    [
        (parse_elements, "50MB", "is in bytes, but this is in elements"),
        (parse_elements, "50MiB", "is in bytes, but this is in elements"),
        (parse_bytes, "50M", "is in elements, but this is in bytes"),
        (parse_elements, -1, "is negative"),
        (parse_elements, "-5M", "is negative"),
        (parse_elements, 1.5, "not a whole number"),
        (parse_elements, True, "is not a number of elements"),
        (parse_elements, "", "is not a number of elements"),
        (parse_elements, None, "is not a number of elements"),
        (parse_elements, float("nan"), "not a finite number"),
        (parse_bytes, float("inf"), "not a finite number"),
        (parse_elements, "1e999999999999", "too large"),
        (parse_elements, 1e19, "too large"),
        (parse_elements, "5x", "unknown suffix"),
        (parse_bytes, "5 parsecs", "unknown suffix"),
        (parse_duration, "5x", "unknown suffix"),
        (parse_duration, -1, "is negative"),
        (parse_bytes, 0.5, "not a whole number"),
    ],
)  # fmt: skip
def test_refused(parse: object, written: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(written)  # type: ignore[operator]


@given(st.integers(0, 10**18))
def test_whole_numbers_come_back(number: int) -> None:
    assert parse_elements(number) == parse_elements(str(number)) == number
    assert parse_bytes(number) == parse_bytes(str(number)) == number


@given(
    st.integers(0, 10**6),
    st.sampled_from([("k", 10**3), ("M", 10**6), ("G", 10**9), ("B", 10**9), ("T", 10**12)]),
)
def test_suffixes_multiply(thousandths: int, suffix: tuple[str, int]) -> None:
    """Three decimals and any suffix give a whole number, exactly."""
    name, factor = suffix
    assert (
        parse_elements(f"{thousandths // 1000}.{thousandths % 1000:03}{name}") == thousandths * factor // 1000
    )

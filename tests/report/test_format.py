"""Figures as text."""

from __future__ import annotations

import pytest

from zerotune.records import Interval
from zerotune.report import format


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format.number(None), "-"),
        (format.number(4123.4), "4,123"),
        (format.number(12.345), "12.35"),
        (format.number(7), "7"),
        (format.number(10**9), "1,000,000,000"),
        (format.memory(None), "-"),
        (format.memory(0), "0 B"),
        (format.memory(1023), "1023 B"),
        (format.memory(200 * 2**20), "200.0 MiB"),
        (format.memory(40 * 2**30), "40.0 GiB"),
        (format.milliseconds(0.2481), "248.1"),
        (format.duration(0.25), "0.25 s"),
        (format.duration(45.4), "45 s"),
        (format.duration(185), "3 min 05 s"),
        (format.duration(7800), "2 h 10 min"),
        (format.setting(None), "none"),
        (format.setting(True), "true"),
        (format.setting(50_000_000), "50000000"),
        (format.count(1, "run"), "1 run"),
        (format.count(0, "run"), "0 runs"),
    ],
)
def test_figures(text, expected):
    assert text == expected


def test_intervals():
    assert format.number_interval(Interval(value=4123, low=4100, high=4150)) == "4,123 [4,100, 4,150]"
    assert format.change(Interval(value=1.123, low=1.101, high=1.146)) == "+12.3 % [10.1, 14.6]"
    assert format.change(Interval(value=0.9, low=0.85, high=0.95)) == "-10.0 % [-15.0, -5.0]"
    assert format.change(Interval(value=1.01, low=0.99, high=1.03)) == "+1.0 % [-1.0, 3.0] tie"
    assert format.change(None) == format.number_interval(None) == "-"

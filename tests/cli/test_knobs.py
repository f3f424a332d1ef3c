"""``zerotune knobs``."""

from __future__ import annotations

import json

import pytest

from zerotune.cli.main import run
from zerotune.config.knobs import REGISTRY


def test_lists_every_knob_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["knobs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for info in REGISTRY.values():
        row = next(line for line in lines if f" {info.path} " in line)
        assert info.default in row and info.meaning in row


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["knobs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [knob["name"] for knob in found] == list(REGISTRY)
    assert found[3]["path"] == "zero.prefetch_distance" and found[3]["stages"] == [3]


@pytest.mark.parametrize(
    "name", ["prefetch_distance", "zero.prefetch_distance", "stage3_prefetch_bucket_size"]
)
def test_one_knob(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["knobs", name]) == 0
    text = capsys.readouterr().out
    for label, value in REGISTRY["prefetch_distance"].details():
        assert any(line.startswith(label) and value in line for line in text.splitlines())
    assert run(["knobs", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "prefetch_distance"


def test_no_such_knob(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["knobs", "prefech"]) == 2
    assert capsys.readouterr().err == "error: prefech: no such knob (did you mean prefetch_distance?)\n"

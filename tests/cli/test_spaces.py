"""``zerotune spaces``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerotune.cli.main import run
from zerotune.config.space import list_spaces, load_space


def test_lists_every_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["spaces"]) == 0
    text = capsys.readouterr().out
    for name in list_spaces():
        assert name in text and load_space(name).description in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["spaces", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [space["name"] for space in found] == list_spaces()
    assert run(["spaces", "quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["knobs"]["release"] == {"values": ["after_use", "keep"]}


def test_one_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["spaces", "memory"]) == 0
    text = capsys.readouterr().out
    assert "none, 1, 2, 4" in text and "x largest block" in text and "release: reuse" in text


def test_a_file_with_ranges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "knobs:\n  overlap_comm: [true, false]\n  prefetch_distance: {low: 1k, high: 1M, log: true}\n"
    )
    assert run(["spaces", str(file)]) == 0
    text = capsys.readouterr().out
    assert "true, false" in text and "1000 to 1000000, by its logarithm" in text and "elements" in text


def test_no_such_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["spaces", "qick"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: no space is called 'qick' (did you mean quick? there are default, "
    )

"""``zerotune compare``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import make_run, make_workload
from tests.cli.reading import demo_runs, fill, run_command
from zerotune.cli.compare import compare


@pytest.fixture
def store(tmp_path: Path) -> str:
    other = make_run("t-55555555", 9000.0, workload=make_workload("llama"))
    return fill(tmp_path / "zerotune.db", [*demo_runs(), other])


def test_a_clear_difference(store):
    text = run_command(compare, "t-1", "t-2", "--store", store).stdout
    assert "zero.release" in text
    assert "1.250x [1.233, 1.268]" in text
    assert "t-22222222 is faster" in text


def test_a_run_against_itself(store):
    text = run_command(compare, "t-1", "t-1", "--store", store).stdout
    assert "a tie" in text
    assert "what differs" not in text


def test_different_workloads_are_shown_and_not_ranked(store):
    text = run_command(compare, "t-1", "t-5", "--store", store).stdout
    assert "note: different workloads (model)" in text
    assert "is faster" not in text
    document = json.loads(run_command(compare, "t-1", "t-5", "--store", store, "--json").stdout)
    assert document["comparable"] is False
    assert document["faster"] is None


def test_json(store):
    document = json.loads(run_command(compare, "t-1", "t-2", "--store", store, "--json").stdout)
    assert [run["run_id"] for run in document["runs"]] == ["t-11111111", "t-22222222"]
    assert document["config"] == {"zero.release": ["after_use", "keep"]}
    assert document["ratios"]["tokens_per_second"]["value"] == 1.25
    assert document["faster"] == "t-22222222"
    failed = json.loads(run_command(compare, "t-1", "t-4", "--store", store, "--json").stdout)
    assert failed["ratios"] == {}


def test_mistakes(store):
    assert run_command(compare, "t-1", "nosuch", "--store", store).exit_code == 2

"""``zerotune show``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.reading import demo_runs, demo_study, fill, run_command
from zerotune.cli.show import show


@pytest.fixture
def store(tmp_path: Path) -> str:
    return fill(tmp_path / "zerotune.db", demo_runs(), [demo_study()])


def test_a_run_by_the_beginning_of_its_id(store):
    text = run_command(show, "t-2", "--store", store).stdout
    for words in (
        "run t-22222222",
        "complete",
        "5,000 [4,950, 5,050]",
        "zero.release",
        "changed",
        "reduce_scatter",
    ):
        assert words in text, words


def test_a_failure(store):
    text = run_command(show, "t-4", "--store", store).stdout
    for words in ("oom_device", "cannot allocate 512.0 MiB", "backward", "logs/rank1.log"):
        assert words in text, words


def test_json(store):
    document = json.loads(run_command(show, "t-2", "--store", store, "--json").stdout)
    assert document["run_id"] == "t-22222222"
    assert document["ledger"]["ranks"] == 2
    failed = json.loads(run_command(show, "t-4", "--store", store, "--json").stdout)
    assert failed["tokens_per_second"] is None
    assert failed["failure"]["phase"] == "backward"


def test_mistakes(store, tmp_path):
    answer = run_command(show, "t-", "--store", store)
    assert answer.exit_code == 2
    assert "several runs" in str(answer.error)
    answer = run_command(show, "t-11111112", "--store", store)
    assert answer.exit_code == 2
    assert "did you mean t-11111111" in str(answer.error)
    answer = run_command(show, "t-1", "--store", str(tmp_path / "none.db"))
    assert answer.exit_code == 2
    assert "run zerotune search" in str(answer.error)

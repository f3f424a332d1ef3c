"""``zerotune explain``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.reading import demo_runs, fill, run_command
from zerotune.cli.compare import compare
from zerotune.cli.explain import explain
from zerotune.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> str:
    return fill(tmp_path / "zerotune.db", demo_runs())


def test_in_the_terminal_and_as_json(store):
    text = run_command(explain, "t-1", "--store", store).stdout
    for question in (
        "Which shards are resident", "Which full parameters", "Is communication hidden", "released soon", "Are gradients",
    ):  # fmt: skip
        assert question in text
    document = json.loads(run_command(explain, "t-1", "--store", store, "--json").stdout)
    assert document["run_id"] == "t-11111111"
    assert document["peak"]["bytes"] == sum(document["peak"]["classes"].values())


def test_a_page_and_a_trace(store, tmp_path):
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    answer = run_command(explain, "t-1", "--store", store, "--html", str(page), "--trace", str(trace))
    assert f"wrote {page}" in answer.stderr.replace("\n", "") and "wrote" not in answer.stdout
    assert "t-11111111" in page.read_text() and "gpt 4 x 256" in page.read_text()
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1}


def test_compare_shows_both_steps(store, tmp_path):
    page = tmp_path / "both.html"
    text = run_command(compare, "t-1", "t-2", "--store", store, "--html", str(page)).stdout
    assert "one step, explained" in text and "AllGather in backward, exposed" in text
    assert "t-22222222 rank 1 AllGather" in page.read_text()
    document = json.loads(run_command(compare, "t-1", "t-2", "--store", store, "--json").stdout)
    assert document["step"]["peak"]["unit"] == "bytes"


def test_mistakes(store, tmp_path):
    assert run_command(explain, "nosuch", "--store", store).exit_code == 2
    missing = str(tmp_path / "nosuch" / "page.html")
    assert "cannot write" in str(run_command(explain, "t-1", "--store", store, "--html", missing).error)
    with Store.open(f"sqlite:///{store}") as opened:
        opened.save_ledgers("t-22222222", [])
    assert "no ledger" in str(run_command(explain, "t-2", "--store", store).error)
    only_one = run_command(compare, "t-1", "t-2", "--store", store, "--html", str(tmp_path / "x.html"))
    assert only_one.exit_code == 2
    assert "one step, explained" not in run_command(compare, "t-1", "t-2", "--store", store).stdout

"""``zerotune results``."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tests.builders import EPOCH, make_cluster, make_run, make_study, make_workload
from tests.cli.reading import demo_runs, demo_study, fill, run_command
from zerotune.cli.results import results


@pytest.fixture
def store(tmp_path: Path) -> str:
    return fill(tmp_path / "zerotune.db", demo_runs(), [demo_study()])


def test_the_table(store):
    answer = run_command(results, "--store", store)
    assert answer.exit_code == 0
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("gpt 4 x 256 on text, global batch 8, fp32, adamw · 1 node x 2 ranks of cpu")
    ranked = [line.split()[1] for line in lines if line.strip()[:1] in ("1", "2") and "t-" in line]
    assert ranked == ["t-22222222", "t-11111111"]
    assert "[3,762, 3,838]" in answer.stdout
    assert "+25.0 % [20.2, 30.0]" in answer.stdout and "in turns" in answer.stdout
    assert lines[-3].startswith("next: zerotune launch")
    assert lines[-2].split()[:3] == ["zerotune", "show", "t-22222222"]
    assert "selection" not in answer.stdout
    assert "not ranked: 1 over the memory budget, 1 oom_device" in answer.stdout
    assert answer.stderr == ""


def test_json(store):
    answer = run_command(results, "--store", store, "--json")
    document = json.loads(answer.stdout)
    assert list(document) == ["runs"]
    assert [(run["run_id"], run["rank"], run["status"]) for run in document["runs"]] == [
        ("t-22222222", 1, "complete"),
        ("t-11111111", 2, "complete"),
        ("t-33333333", None, "complete"),
        ("t-44444444", None, "oom_device"),
    ]
    assert document["runs"][0]["config"]["zero"]["release"] == "keep"
    assert document["runs"][0]["speedup"] == 1.25


def test_csv(store):
    lines = run_command(results, "--store", store, "--csv").stdout.splitlines()
    assert lines[0].startswith("run_id,rank,pareto")
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--top", "1"], ["t-22222222"]),
        (["--pareto"], ["t-22222222"]),
        (["--sort", "memory", "--top", "2"], ["t-22222222", "t-11111111"]),
        (["--study", "demo", "--top", "9"], ["t-22222222", "t-11111111"]),
    ],
)
def test_selection(store, options, expected):
    document = json.loads(run_command(results, "--store", store, "--json", *options).stdout)
    assert [run["run_id"] for run in document["runs"]] == expected
    table = run_command(results, "--store", store, *options).stdout
    assert all(run_id in table for run_id in expected)
    assert "t-44444444" not in table or "--study" in options


def test_one_table_for_each_workload_and_cluster_the_youngest_first(tmp_path):
    later = {"created": EPOCH + timedelta(days=1)}
    runs = [
        make_run("t-1", 1000.0),
        make_run("t-2", 9000.0, workload=make_workload("llama"), study="b", **later),
        make_run("t-3", 5000.0, cluster=make_cluster(nodes=2), study="c", created=EPOCH + timedelta(days=2)),
    ]
    store = fill(tmp_path / "zerotune.db", runs)
    document = json.loads(run_command(results, "--store", store, "--json").stdout)
    assert [(run["run_id"], run["rank"]) for run in document["runs"]] == [("t-3", 1), ("t-2", 1), ("t-1", 1)]
    text = run_command(results, "--store", store).stdout
    assert text.count("  tokens/s  95 %") == 3
    assert text.index("t-3") < text.index("t-2") < text.index("t-1")


def test_nothing_succeeded(tmp_path):
    store = fill(
        tmp_path / "zerotune.db", [make_run(f"t-{n}", None, number=n) for n in range(3)], [make_study()]
    )
    answer = run_command(results, "--store", store)
    assert answer.exit_code == 0
    assert "no feasible trial was measured" in answer.stdout
    assert "not ranked: 3 oom_device" in answer.stdout


@pytest.mark.parametrize("options", [[], ["--json"], ["--csv"]])
def test_no_store_yet(tmp_path, options):
    path = tmp_path / "deep" / "zerotune.db"
    answer = run_command(results, "--store", str(path), *options)
    assert answer.exit_code == 0
    assert "no results yet" in answer.stderr and "run zerotune search" in answer.stderr
    assert not path.parent.exists()
    if options == ["--json"]:
        assert json.loads(answer.stdout) == {"runs": []}


def test_an_empty_store(tmp_path):
    answer = run_command(results, "--store", fill(tmp_path / "zerotune.db", []))
    assert answer.exit_code == 0
    assert "no results yet" in answer.stderr


def test_mistakes(store, tmp_path):
    answer = run_command(results, "--store", store, "--study", "dmo")
    assert answer.exit_code == 2
    assert "did you mean demo?" in str(answer.error)
    answer = run_command(results, "--store", store, "--json", "--csv")
    assert answer.exit_code == 2
    assert "exclude each other" in str(answer.error)
    (tmp_path / "garbage.db").write_bytes(b"garbage" * 1000)
    answer = run_command(results, "--store", str(tmp_path / "garbage.db"))
    assert answer.exit_code == 2
    assert "is not a zerotune store" in str(answer.error)
    assert run_command(results, "--store", str(tmp_path)).exit_code == 2


@pytest.mark.parametrize("command", ["results", "show", "compare", "export"])
def test_the_module_imports_nothing_heavy(command):
    code = (
        f"import sys, zerotune.cli.{command}\n"
        "heavy = {'torch', 'ray', 'optuna', 'sqlalchemy', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""``zerotune export``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.builders import EPOCH, make_run, make_study, make_workload
from tests.cli.reading import demo_runs, demo_study, fill, run_command
from zerotune.cli.export import export
from zerotune.config.load import load_job


@pytest.fixture
def store(tmp_path: Path) -> str:
    return fill(tmp_path / "zerotune.db", demo_runs(), [demo_study()])


def test_the_best_reads_back_as_it_ran(store, tmp_path):
    file = tmp_path / "best.yaml"
    answer = run_command(export, "best", "--to", "yaml", "--output", str(file), "--store", store)
    assert answer.exit_code == 0
    assert "best is t-22222222 of study demo" in answer.stderr
    assert answer.stdout == ""
    assert load_job(file).job == demo_runs()[1].config
    head = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert head[0] == "# run t-22222222, trial 1 of study demo: complete"
    assert any("5,000 [4,950, 5,050] tokens/s, peak memory 200.0 MiB" in line for line in head)


def test_stdout_holds_nothing_but_the_file(store, tmp_path):
    answer = run_command(export, "t-1", "--store", store)
    assert answer.stderr == ""
    (tmp_path / "copy.yaml").write_text(answer.stdout)
    assert load_job(tmp_path / "copy.yaml").job == demo_runs()[0].config


def test_a_run_that_failed_is_exported_with_a_note(store):
    answer = run_command(export, "t-4", "--store", store)
    assert answer.exit_code == 0
    assert "ended as oom_device" in answer.stderr


class TestBest:
    def test_of_the_latest_study_that_has_one(self, tmp_path):
        studies = [make_study(name, created=EPOCH + timedelta(days=day)) for day, name in enumerate("abc")]
        runs = [
            make_run("t-1", 9000.0, study="a"),
            make_run("t-2", 1000.0, study="b", workload=make_workload("llama")),
            make_run("t-3", None, study="c"),
        ]
        store = fill(tmp_path / "zerotune.db", runs, studies)
        answer = run_command(export, "best", "--store", store)
        assert "best is t-2 of study b, the latest of 3 studies; --study picks another" in answer.stderr
        answer = run_command(export, "best", "--study", "a", "--store", store)
        assert answer.stderr == "best is t-1 of study a\n"
        answer = run_command(export, "best", "--study", "c", "--store", store)
        assert answer.exit_code == 5
        assert "no feasible trial in study c" in str(answer.error)

    def test_by_the_objective_of_the_study(self, tmp_path):
        runs = [
            make_run("t-1", 9000.0, peak_memory_bytes=900),
            make_run("t-2", 1000.0, peak_memory_bytes=100),
        ]
        store = fill(tmp_path / "zerotune.db", runs, [make_study(objective="memory")])
        assert "best is t-2" in run_command(export, "best", "--store", store).stderr


def test_mistakes(store, tmp_path):
    answer = run_command(export, "best", "--store", store, "--output", str(tmp_path / "no" / "best.yaml"))
    assert answer.exit_code == 2
    assert "cannot be written" in str(answer.error)
    answer = run_command(export, "best", "--store", str(tmp_path / "none.db"))
    assert answer.exit_code == 2
    assert run_command(export, "best", "--study", "dmo", "--store", store).exit_code == 2


class TestWeights:
    @pytest.fixture
    def launch(self, tmp_path: Path):
        """A store with a trial, and a launch of its workload that has saved."""
        from tests.checkpoints.jobs import build
        from zerotune.records import RunKind

        engine = build()
        engine.save(tmp_path / "run" / "checkpoints")
        saved = make_run("l-1", None, kind=RunKind.LAUNCH, run_dir=str(tmp_path / "run"), study=None)
        store = fill(tmp_path / "zerotune.db", [*demo_runs(), saved], [demo_study()])
        return store, engine.full_state_dict()

    @pytest.mark.parametrize("run", ["l-1", "best"])
    def test_of_a_launch_or_of_the_bests_workload(self, launch, tmp_path, run):
        import torch

        from zerotune.checkpoints import read_weights

        store, expected = launch
        file = tmp_path / "model.safetensors"
        answer = run_command(
            export, run, "--to", "weights", "-o", str(file), "--dtype", "bf16", "--store", store
        )
        assert answer.exit_code == 0 and f"wrote {file} from " in answer.stderr
        found = read_weights(file)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)

    def test_mistakes(self, launch, tmp_path):
        store, _ = launch
        answer = run_command(export, "t-1", "--to", "weights", "--store", store)
        assert answer.exit_code == 2 and "no complete checkpoint" in str(answer.error)
        answer = run_command(export, "l-1", "--to", "weights", "--store", store, "--dtype", "int3")
        assert answer.exit_code == 2 and "int3" in str(answer.error)
        answer = run_command(export, "l-1", "--to", "weights", "--store", store, "-o", str(tmp_path))
        assert answer.exit_code == 2 and "is a folder" in str(answer.error)
        answer = run_command(export, "t-1", "--dtype", "bf16", "--store", store)
        assert answer.exit_code == 2

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import Folder, make_folder
from tests.cli.test_search import surface
from tests.search.fakes import fail
from zerotune.checkpoints.folders import prepare, publish
from zerotune.checkpoints.manifest import Manifest
from zerotune.cli.interrupts import Interrupted
from zerotune.config.errors import ExitCode
from zerotune.config.schema import JobConfig
from zerotune.records import RunKind, Status


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Folder:
    return make_folder(tmp_path, monkeypatch, capsys, surface)


def launched(folder: Folder) -> JobConfig:
    """The configuration that ran last."""
    return folder.workers.specs[-1].job


def test_without_results_the_files_own_knobs_are_taken_and_it_says_so(folder: Folder) -> None:
    code, out, err = folder("launch", "--set", "zero.release=keep")
    assert code == 0
    assert "nothing of this workload was searched yet" in err
    job = launched(folder)
    assert job.zero.release == "keep" and job.zero.is_resolved and job.train.micro_batch_size == 4
    assert "5 steps" in out and "3.0000 -> 2.6000" in out and "none (set train.save_every)" in out


def test_the_best_known_configuration_is_taken(folder: Folder) -> None:
    best = folder.json("search")["best"]
    code, _, err = folder("launch")
    assert code == 0
    assert f"configuration: run {best['run_id']}, confirmed as the best of 4 trials" in err
    assert launched(folder).zero.model_dump(mode="json") == best["config"]["zero"]


def test_the_best_of_the_nearest_cluster_with_what_speaks_against_it(folder: Folder) -> None:
    best = folder.json("search")["best"]
    code, _, err = folder("launch", "--nodes", "2")
    assert code == 0
    assert f"run {best['run_id']}" in err and "note: measured on 1 node, not 2" in err
    # Four samples a rank were measured on 2 ranks; on 4 there are only two for each.
    assert launched(folder).train.micro_batch_size == 2
    assert "micro_batch_size 2 instead of 4" in err


def test_config_names_the_defaults_a_run_or_a_file(folder: Folder) -> None:
    found = folder.json("search")
    assert folder("launch", "--config", "default")[0] == 0
    assert launched(folder).zero == folder.workers.specs[0].job.zero

    run_id = found["baseline"]["run_id"]
    _, _, err = folder("launch", "--config", run_id[:6])
    assert f"configuration: run {run_id}, as asked for" in err

    _, _, err = folder("launch", "--config", "best.yaml")
    assert "configuration: the file best.yaml" in err
    assert launched(folder).zero.model_dump(mode="json") == found["best"]["config"]["zero"]


def test_best_yaml_is_a_model_yaml_too(folder: Folder) -> None:
    best = folder.json("search")["best"]
    assert folder("launch", "best.yaml", "--config", "default")[0] == 0
    assert launched(folder).model_dump(mode="json") == best["config"]


def test_a_knob_that_is_set_wins_over_the_chosen_one(folder: Folder) -> None:
    folder("search")
    _, _, err = folder("launch", "--set", "zero.release=after_use", "--set", "zero.overlap_comm=false")
    assert "with release, overlap_comm from --set" in err
    assert (launched(folder).zero.release, launched(folder).zero.overlap_comm) == ("after_use", False)


def test_json_has_the_keys_that_programs_rely_on(folder: Folder) -> None:
    found = folder.json("launch", "--steps", "3")
    wanted = {"run_id", "status", "tokens_per_second", "step_time_s", "peak_memory_bytes", "config"}
    assert wanted | {"final_loss", "steps", "checkpoint"} <= found.keys()
    assert (found["status"], found["steps"], found["checkpoint"]) == ("complete", 3, None)
    assert found["final_loss"] == pytest.approx(2.8)
    with folder.store as store:
        assert store.get_run(found["run_id"]).kind is RunKind.LAUNCH


def test_a_failure_names_rank_and_log_and_shows_its_last_lines(folder: Folder, tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_text("starting\nRuntimeError: no\n")

    def breaks(job: JobConfig) -> None:
        raise fail(Status.OOM_DEVICE, "rank 1 on node0 ran out of device memory", log_path=str(log))

    folder.workers.surface = breaks  # type: ignore[assignment]
    code, out, err = folder("launch")
    assert code == ExitCode.RUN_FAILED and out == ""
    assert "  RuntimeError: no" in err
    last = err.splitlines()[-1]
    assert "oom_device: rank 1 on node0 ran out of device memory" in last and str(log) in last
    with folder.store as store:
        (run,) = store.runs()
    assert run.status is Status.OOM_DEVICE and run.failure and run.failure.rank == 1

    code, out, _ = folder("launch", "--json")
    assert code == ExitCode.RUN_FAILED and '"status": "oom_device"' in out


def test_ctrl_c_ends_it_with_one_line(folder: Folder) -> None:
    def interrupted(job: JobConfig) -> None:
        raise Interrupted(ExitCode.INTERRUPTED)

    folder.workers.surface = interrupted  # type: ignore[assignment]
    code, _, err = folder("launch", "--set", "train.save_every=2")
    assert code == ExitCode.INTERRUPTED
    assert err.splitlines()[-1] == "interrupted: add --resume to go on from its last checkpoint"
    with folder.store as store:
        (run,) = store.runs()
    assert run.status is Status.INTERRUPTED


def test_resume_takes_the_latest_checkpoint_of_this_workload(folder: Folder) -> None:
    code, _, err = folder("launch", "--resume")
    assert code == ExitCode.USAGE and "no checkpoint of this workload" in err and "save_every" in err

    folder("launch")
    with folder.store as store:
        (run,) = store.runs()
    assert run.run_dir is not None
    for step in (2, 4):
        checkpoints = Path(run.run_dir) / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        (prepare(checkpoints, step) / ".metadata").write_text("{}")
        publish(checkpoints, step, Manifest(step=step, ranks=2, optimizer_groups=[], weights=[], extra={}))
    code, _, err = folder("launch", "--resume", "--steps", "4")
    assert code == ExitCode.USAGE and "already taken 4 of train.steps 4" in err
    code, _, err = folder("launch", "--resume", "--steps", "9")
    assert code == 0 and f"resuming from run {run.run_id} after 4 steps" in err
    assert folder.workers.specs[-1].resume_from == str(Path(run.run_dir) / "checkpoints")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config", "t-nothing"], "t-nothing"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--steps", "0"], "--steps"),
        (["--set", "train.global_batch_size=9"], "does not divide over 2 ranks"),
        (["nowhere.yaml"], "zerotune init"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(folder: Folder, args: list[str], message: str) -> None:
    code, _, err = folder("launch", *args)
    assert code == ExitCode.USAGE and message in err
    assert len(err.strip().splitlines()) == 1
    assert folder.workers.specs == []


def test_the_plan_is_a_whole_model_yaml(folder: Folder, tmp_path: Path) -> None:
    from zerotune.config.load import read_job

    code, out, err = folder("launch", "--dry-run", "--steps", "7")
    assert code == 0 and "nothing was started" in err
    assert "# ranks" in out and "# configuration" in out
    loaded = read_job(out)
    assert loaded.job.train.steps == 7 and loaded.job.zero.is_resolved
    assert folder.workers.specs == [] and not (tmp_path / "results").exists()
    best = folder.json("search")["best"]
    plan = folder.json("launch", "--dry-run")
    assert best["run_id"] in plan["origin"] and plan["config"]["zero"] == best["config"]["zero"]

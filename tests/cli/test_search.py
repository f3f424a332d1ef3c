from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.builders import MIB, make_run
from tests.cli.running import Folder, make_folder
from tests.search.fakes import Point, fail
from zerotune.cli.interrupts import Interrupted
from zerotune.cli.live import LiveSearch
from zerotune.config.errors import ExitCode
from zerotune.config.load import load_job
from zerotune.config.schema import JobConfig
from zerotune.records import RunKind, Status
from zerotune.records.events import SearchStarted, TrialFinished, TrialProgress, TrialStarted


def surface(job: JobConfig) -> Point:
    return Point(
        1.0 - 0.1 * (job.zero.release == "keep"), 100 * MIB + int(job.zero.prefetch_distance) // 1000 * 1000
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Folder:
    return make_folder(tmp_path, monkeypatch, capsys, surface)


def test_a_search_prints_the_ranking_the_speedup_and_what_to_do_next(folder: Folder) -> None:
    code, out, err = folder("search")
    assert code == 0
    assert "1.111x [1.111, 1.111] of the baseline's speed in 2 rounds in turns (95 % interval)" in out
    assert "wrote best.yaml" in out
    assert "next: zerotune launch\n" in out
    assert "release=keep" in out
    lines = [line for line in err.splitlines() if line.startswith("[")]
    assert [line[:5] for line in lines] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "defaults" in lines[0] and "ETA" in lines[0]
    with folder.store as store:
        best = store.get_run(store.studies()[0].best or "")
    assert load_job(folder.path / "best.yaml").job == best.config
    assert folder.workers.closed


def test_the_same_command_again_only_prints_the_result(folder: Folder) -> None:
    _, first, _ = folder("search")
    ran = len(folder.workers.specs)
    (folder.path / "best.yaml").unlink()
    code, second, err = folder("search")
    assert code == 0 and len(folder.workers.specs) == ran
    assert "4 of them finished earlier" in err
    assert first.splitlines()[:8] == second.splitlines()[:8]
    assert (folder.path / "best.yaml").is_file()


def test_json_has_the_keys_that_programs_rely_on(folder: Folder) -> None:
    found = folder.json("search", "--trials", "8", "--memory-budget", "110MiB")
    assert {
        "study",
        "trials",
        "baseline",
        "best",
        "speedup",
        "speedup_ci",
        "pareto",
        "wall_seconds",
    } <= found.keys()
    assert found["trials"] == {"complete": 8}
    assert found["speedup"] == pytest.approx(1 / 0.9)
    assert found["speedup_ci"][0] <= found["speedup"] <= found["speedup_ci"][1]
    for run in (found["baseline"], found["best"], *found["pareto"]):
        assert {
            "run_id",
            "status",
            "tokens_per_second",
            "step_time_s",
            "peak_memory_bytes",
            "config",
        } <= run.keys()
    assert found["baseline"]["is_baseline"] and found["baseline"]["trial_number"] == 0
    assert found["best"]["run_id"] in [run["run_id"] for run in found["pareto"]]
    assert found["best"]["rank"] == 1


def test_the_result_of_a_search_is_what_results_prints(folder: Folder) -> None:
    found = folder.json("search")
    listed = folder.json("results")
    assert len(listed["runs"]) == 4
    assert listed["runs"][0]["run_id"] == found["best"]["run_id"]


def test_options_win_over_the_file(folder: Folder) -> None:
    folder(
        "search",
        "--trials",
        "2",
        "--objective",
        "memory",
        "--sampler",
        "random",
        "--seed",
        "7",
        "--study",
        "mine",
    )
    with folder.store as store:
        (study,) = store.studies()
        config = store.runs()[0].config
    assert (study.name, study.objective, study.trials_wanted) == ("mine", "memory", 2)
    assert (config.search.sampler, config.search.seed) == ("random", 7)


def test_nothing_feasible_is_exit_5_with_the_closest(folder: Folder) -> None:
    code, out, err = folder("search", "--trials", "8", "--memory-budget", "50MiB")
    assert code == ExitCode.NOTHING_FEASIBLE
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert "nothing meets the memory budget of 50.0 MiB (8 over the memory budget)" in line
    assert "100.0 MiB" in line and "50.0 MiB too much" in line and "prefetch_distance=0" in line
    assert "--memory-budget to 100MiB" in line
    assert out.count("over the memory budget of 50.0 MiB") == 8
    assert not (folder.path / "best.yaml").exists()


def test_failing_trials_are_exit_1_with_the_first_reason(folder: Folder) -> None:
    def broken(job: JobConfig) -> Point:
        raise fail(Status.FAILED, "rank 1 on node0: KeyError: 'x'", log_path="/logs/rank1.log")

    folder.workers.surface = broken
    code, _, err = folder("search")
    assert code == ExitCode.RUN_FAILED
    assert "KeyError: 'x'" in err and "/logs/rank1.log" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.yaml"], "zerotune init"),
        (["--space", "defualt"], "did you mean default?"),
        (["--memory-budget", "5M"], "search.memory_budget"),
        (["--time", "soon"], "search.time"),
        (["--set", "train.global_batch_size=7"], "global_batch_size 7 does not divide over 2 ranks"),
        (["--set", "zero.prefech_distance=0"], "did you mean prefetch_distance?"),
        (["--objective", "speed"], "speed"),
        (["--store", "/proc/nowhere/zerotune.db"], "/proc/nowhere"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(folder: Folder, args: list[str], message: str) -> None:
    code, out, err = folder("search", *args)
    assert code == ExitCode.USAGE
    assert message in err
    assert len(err.strip().splitlines()) == 1 and out == ""
    assert folder.workers.specs == []


def test_another_question_under_the_same_name_shows_the_difference(folder: Folder) -> None:
    folder("search", "--study", "mine", "--trials", "1")
    code, _, err = folder("search", "--study", "mine", "--trials", "1", "--objective", "memory")
    assert code == ExitCode.USAGE
    assert "objective: throughput in the study, memory now" in err


@pytest.mark.parametrize(
    ("signalled", "word"), [(ExitCode.INTERRUPTED, "interrupted"), (ExitCode.TERMINATED, "terminated")]
)
def test_a_signal_ends_it_with_one_line_and_the_same_command_goes_on(
    folder: Folder, signalled: ExitCode, word: str
) -> None:
    def third_is_interrupted(job: JobConfig) -> Point:
        if len(folder.workers.specs) == 3:
            raise Interrupted(signalled)
        return surface(job)

    folder.workers.surface = third_is_interrupted
    code, out, err = folder("search")
    assert code == signalled and out == ""
    assert err.splitlines()[-1] == f"{word}: finished trials are kept, run the same command to go on"
    assert folder.workers.closed
    with folder.store as store:
        assert [run.status.value for run in store.runs()] == ["complete", "complete", "interrupted"]
    folder.workers.surface = surface
    assert folder.json("search")["trials"] == {"complete": 4}


def test_a_folder_that_cannot_be_written_loses_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *args: object, **kwargs: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("zerotune.search.best.Path.write_text", full, raising=False)
        for module in ("execute", "rows"):
            patch.setattr(f"zerotune.runs.{module}.write_resolved", lambda folder, job: None)
        code, out, err = folder("search")
    assert code == 0 and "No space left on device" in err
    assert "release=keep" in out and "wrote" not in out


def test_the_plan_names_ranks_batch_space_and_baseline(folder: Folder) -> None:
    code, out, err = folder("search", "--dry-run", "--nodes", "2", "--set", "train.micro_batch_size=1")
    assert code == 0 and "nothing was started" in err
    assert "2 nodes x 2 ranks = 4" in out
    assert "8 = 4 ranks x 1 samples x 2 micro-batches" in out
    block = 49_856
    assert f"0, {block}, {2 * block}, {4 * block}" in out
    assert folder.workers.specs == [] and not (folder.path / "results").exists()
    plan = folder.json("search", "--dry-run")
    assert plan["ranks"] == 2 and plan["baseline"]["release"] == "after_use"


def test_the_live_table_shows_the_running_trial_and_the_best(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    seen: list[str] = []

    class Watched(LiveSearch):
        def show(self, event):  # type: ignore[no-untyped-def]
            super().show(event)
            copy = Console(file=io.StringIO(), width=140)
            copy.print(self._render())
            seen.append(copy.file.getvalue())  # type: ignore[attr-defined]

    monkeypatch.setattr("zerotune.cli.live.search_view", lambda console: Watched(screen))
    code, _, err = folder("search")
    assert code == 0, err
    text = "\n".join(seen)
    for part in (
        "trial 0 (baseline): defaults",
        "warmup 1/3",
        "best so far: trial",
        "ETA",
        "trial 3 (sampler): ",
        "  starting",
        "the defaults",
        "round 2 of 2",
        "3/4",
    ):
        assert part in text
    assert "no feasible trial yet" in seen[0]


def test_the_live_table_leaves_room_for_what_is_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would cut the bar and the running trial, which are at the bottom of a screen that is too small."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=16, color_system=None)
    view = LiveSearch(console)
    now = [0.0]
    monkeypatch.setattr("zerotune.cli.live.time.monotonic", lambda: now[0])
    started = {
        "study": "s",
        "trials": 9,
        "finished": 0,
        "ranks": 2,
        "objective": "throughput",
        "space": "default",
    }
    view.show(SearchStarted(**started, memory_budget=None, time_budget=None, spent_seconds=0.0))
    changes = dict.fromkeys(
        ("unit_size", "prefetch_distance", "allgather_bucket_size", "a", "b"), "123456789"
    )
    for number in range(8):
        run = make_run(f"t-{number}", number=number)
        view.show(
            TrialFinished(
                run=run,
                changes=changes,
                finished=number + 1,
                trials=9,
                eta_seconds=75.0,
                best=run,
                baseline=None,
            )
        )
    view.show(TrialStarted(run_id="t-8", number=8, source="sampler", changes=changes))
    view.show(TrialProgress(run_id="t-8", phase="measure", step=3, steps=10, tokens_per_second=1234.0))
    lines = [line.rstrip() for line in "".join(s.text for s in console.render(view._render())).splitlines()]
    assert 8 <= len(lines) < 16
    text = "\n".join(lines)
    assert "8/9  ETA 1 min 15 s" in text and "measure 3/10  1,234 tok/s" in text
    assert any(line.startswith("7 ") for line in lines) and not any(line.startswith("0 ") for line in lines)
    now[0] = 70.0
    assert "ETA 5 s" in "".join(s.text for s in console.render(view._render()))
    now[0] = 80.0
    assert "ETA" not in "".join(s.text for s in console.render(view._render()))


def test_confirmations_are_in_the_store(folder: Folder) -> None:
    folder("search")
    with folder.store as store:
        assert len(store.runs(kind=RunKind.CONFIRMATION)) == 2 * 4
        first = store.runs(kind=RunKind.TRIAL)[0]
        assert store.ledgers(first.run_id)
    assert first.run_dir is not None
    assert load_job(Path(first.run_dir) / "config.resolved.yaml").job == first.config
    assert {"zerotune", "torch", "python", "platform"} <= first.versions.keys() | {"zerotune"}


def test_a_factory_that_raises_leaves_its_traceback_where_the_line_says(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_log_dir", lambda name: str(folder.path / "logs"))
    (folder.path / "mine.py").write_text("def build():\n    raise KeyError('x')\n")
    (folder.path / "mine.yaml").write_text(
        "model: {factory: {factory: 'mine.py:build'}}\ntrain: {global_batch_size: 8}\n"
    )
    code, out, err = folder("search", "mine.yaml")
    assert code == ExitCode.USAGE and out == "" and len(err.splitlines()) == 1
    assert "factory mine.py:build raised KeyError: 'x' (mine.py:2)" in err
    path = Path(err.strip().removesuffix(")").rpartition("the whole traceback is in ")[2])
    assert path.parent == folder.path / "logs"
    assert "raise KeyError('x')" in path.read_text() and "zerotune search mine.yaml" in path.read_text()

"""S03: interrupted searches, with a real database and, where a driver is killed, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import optuna
import pytest

from tests.search.conftest import Bench, make_job, plan_of
from tests.search.fakes import FakeWorkers, Point
from tests.search.test_study import surface
from zerotune.config.errors import UsageError
from zerotune.config.schema import JobConfig
from zerotune.records import RunKind, Status
from zerotune.records.events import Notice, SearchStarted
from zerotune.runs.owner import this_owner
from zerotune.search.configuration import canonical_key
from zerotune.store.location import file_url
from zerotune.store.store import Store

TRIALS = 6


@pytest.fixture
def bench(real_bench: Bench) -> Bench:
    return real_bench


class Stops(FakeWorkers):
    """Is interrupted in its n-th run."""

    stop_in: int = 0

    def run(self, spec, limits, on_progress):  # type: ignore[no-untyped-def]
        if len(self.specs) + 1 == self.stop_in:
            self.specs.append(spec)
            raise KeyboardInterrupt
        return super().run(spec, limits, on_progress)


def stops(run: int) -> Stops:
    workers = Stops(surface)
    workers.stop_in = run
    return workers


def check(store: Store, study: str, trials: int) -> None:
    """So many finished trials, none twice, none running, nowhere."""
    rows = store.runs(study=study, kind=RunKind.TRIAL)
    finished = [row for row in rows if row.status is Status.COMPLETE]
    keys = Counter(canonical_key(row.config) for row in finished)
    assert len(finished) == trials and max(keys.values()) == 1
    assert [row.trial_number for row in finished] == list(range(trials))
    assert not store.runs(status=Status.RUNNING)
    interrupted = {canonical_key(row.config) for row in rows if row.status is Status.INTERRUPTED}
    assert interrupted <= set(keys), "what was broken off is tried again"
    told = optuna.load_study(study_name=study, storage=store.open_optuna_storage())
    assert not told.get_trials(states=(optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.WAITING))


@pytest.mark.parametrize("run", [1, 4])
def test_after_ctrl_c_the_same_search_goes_on(bench: Bench, run: int) -> None:
    plan = plan_of(make_job(trials=TRIALS))
    with pytest.raises(KeyboardInterrupt):
        bench.search(plan, stops(run))
    rows = bench.store.runs(kind=RunKind.TRIAL)
    assert [row.status for row in rows] == [Status.COMPLETE] * (run - 1) + [Status.INTERRUPTED]
    told = optuna.load_study(study_name=plan.study, storage=bench.store.open_optuna_storage())
    assert not told.get_trials(states=(optuna.trial.TrialState.RUNNING,))

    result = bench.search(plan, workers := FakeWorkers(surface))
    assert len(workers.trials) == TRIALS - run + 1
    check(bench.store, result.study, TRIALS)


def test_a_confirmation_goes_on_with_whole_rounds_only(bench: Bench) -> None:
    plan = plan_of(make_job(trials=4, confirm_rounds=3))
    with pytest.raises(KeyboardInterrupt):
        bench.search(plan, stops(4 + 4 + 2 + 1))  # after four trials, one round and half of the second
    result = bench.search(plan, workers := FakeWorkers(surface))
    assert len(workers.specs) == 2 * 4
    assert result.confirmed[0].rounds == 3


def test_a_finished_search_only_says_so_again(bench: Bench) -> None:
    plan = plan_of(make_job(trials=4))
    first, _ = bench(plan, surface)
    second = bench.search(plan, workers := FakeWorkers(surface))
    assert workers.specs == [] and second.executed == 0
    assert (second.best.run_id, second.speedup) == (first.best.run_id, first.speedup)


def test_trials_are_a_total_that_can_be_raised(bench: Bench) -> None:
    bench(plan_of(make_job(trials=4)), surface)
    result = bench.search(plan_of(make_job(trials=7)), workers := FakeWorkers(surface))
    assert len(workers.trials) == 3
    started = [event for event in bench.events if isinstance(event, SearchStarted)]
    assert [(event.finished, event.trials) for event in started] == [(0, 4), (4, 7)]
    check(bench.store, result.study, 7)


def test_what_was_measured_in_turns_is_kept_until_another_trial_is_added(bench: Bench) -> None:
    result, workers = bench(plan_of(make_job(trials=4)), surface)
    study = bench.store.get_study(result.study)
    assert study.confirmed == result.confirmed and len(study.confirmed) == 4
    assert study.best == study.confirmed[0].run_id and study.speedup == study.confirmed[0].speedup
    assert [each.is_reference for each in study.confirmed].count(True) == 1
    again = [spec.job for spec in workers.specs if not spec.profile_memory]
    assert again[4:] == again[:4][::-1], "every second round runs backwards"

    with pytest.raises(KeyboardInterrupt):
        bench.search(plan_of(make_job(trials=6)), stops(1))
    assert bench.store.get_study(result.study) == study.model_copy(
        update={"trials_wanted": 6, "wall_seconds": bench.store.get_study(result.study).wall_seconds}
    ), "nothing was added yet"
    with pytest.raises(KeyboardInterrupt):
        bench.search(plan_of(make_job(trials=6)), stops(2))
    study = bench.store.get_study(result.study)
    assert (study.best, study.speedup, study.confirmed) == (None, None, []), "an answer covers every trial"
    result, _ = bench(plan_of(make_job(trials=6)), surface)
    assert bench.store.get_study(result.study).confirmed == result.confirmed != []


def test_time_is_a_total_too(bench: Bench) -> None:
    plan = plan_of(make_job(trials=10, time=0.001))
    result, workers = bench(plan, surface)
    assert result.ended_because == "time" and len(workers.trials) == 1
    bench.search(plan, later := FakeWorkers(surface))
    assert later.specs == []


def test_a_study_that_somebody_searches_right_now_is_refused(bench: Bench) -> None:
    plan = plan_of(make_job(trials=4, seed=1))
    bench(plan, surface)
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from zerotune.runs.owner import this_owner; print(this_owner(), flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        owner = other.stdout.readline().strip()
        study = optuna.load_study(study_name=plan.study, storage=bench.store.open_optuna_storage())
        study.set_user_attr("zerotune:driver", owner)
        with pytest.raises(UsageError, match=f"searched by process {other.pid}"):
            bench.search(plan, FakeWorkers(surface))
    finally:
        other.kill()
        other.communicate()
    bench.search(plan, FakeWorkers(surface))  # its driver is dead now


def test_rows_of_live_drivers_are_left_alone(bench: Bench) -> None:
    from tests.builders import make_run
    from zerotune.runs.reap import reap

    mine = make_run("t-mine", None, status=Status.RUNNING, owner=this_owner())
    ghost = make_run("t-ghost", None, status=Status.RUNNING, owner="elsewhere:1:1.0")
    dead = make_run("t-dead", None, status=Status.RUNNING, owner=f"{os.uname().nodename}:{2**22 + 7}:1.0")
    for run in (mine, ghost, dead):
        bench.store.add_run(run)
    assert [run.run_id for run in reap(bench.store)] == ["t-dead"]
    assert bench.store.get_run("t-dead").status is Status.INTERRUPTED
    assert bench.store.get_run("t-ghost").status is Status.RUNNING


# --------------------------------------------------------------------------------------------- a killed driver


def slow(job: JobConfig) -> Point:
    time.sleep(0.1)
    return surface(job)


def drive(folder: str) -> None:
    """A driver: searches in a store until it is done, or killed."""
    with Store.open(file_url(Path(folder) / "zerotune.db")) as store:
        Bench(store, Path(folder)).search(
            plan_of(make_job(trials=TRIALS, confirm_rounds=2)), FakeWorkers(slow)
        )


def start_driver(folder: Path) -> BaseProcess:
    """A process of its own, forked: importing everything anew would take longer than the search."""
    driver = multiprocessing.get_context("fork").Process(target=drive, args=(str(folder),), daemon=True)
    driver.start()
    return driver


def wait_for_trials(store: Store, wanted: int) -> None:
    deadline = time.monotonic() + 60
    while len([row for row in store.runs() if row.status is Status.COMPLETE]) < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_after_kill_9_nothing_is_lost_and_nothing_repeated(tmp_path: Path) -> None:
    url = file_url(tmp_path / "zerotune.db")
    for finished in (2, 4):
        driver = start_driver(
            tmp_path
        )  # before this process opens the database, whose locks a fork would share
        with Store.open(url) as store:
            wait_for_trials(store, finished)
        driver.kill()
        driver.join()
        assert driver.exitcode == -signal.SIGKILL
    with Store.open(url) as store:
        before = {row.run_id for row in store.runs() if row.status is Status.COMPLETE}
        bench = Bench(store, tmp_path)
        plan = plan_of(make_job(trials=TRIALS, confirm_rounds=2))
        result = bench.search(plan, FakeWorkers(surface))
        check(store, result.study, TRIALS)
        assert before <= {row.run_id for row in result.trials}
        ghosts = [row for row in store.runs() if row.status is Status.INTERRUPTED]
        told = [event for event in bench.events if isinstance(event, Notice)]
        assert len(ghosts) <= 2 and len(told) <= 1


@pytest.mark.parametrize("when", ["before the row", "after the row was closed", "after the sampler was told"])
def test_a_driver_that_dies_between_two_writes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Wherever it dies, the next session finds a state that it can go on from."""
    from zerotune.runs.execute import Executor
    from zerotune.search.propose import Proposer
    from zerotune.search.study import Search

    class Died(BaseException):
        pass

    def die(*args: object, **kwargs: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        # What a killed driver does not do either:
        patch.setattr(Proposer, "give_back", lambda self, proposal: None)
        if when == "before the row":
            patch.setattr(Executor, "_open", die)
        elif when == "after the row was closed":
            patch.setattr(Proposer, "tell", die)
        else:
            patch.setattr(Search, "_after", die)
        with pytest.raises(Died):
            bench(plan_of(make_job(trials=4)), surface)
    result = bench.search(plan_of(make_job(trials=4)), workers := FakeWorkers(surface))
    check(bench.store, result.study, 4)
    assert len(workers.trials) == (4 if when == "before the row" else 3)

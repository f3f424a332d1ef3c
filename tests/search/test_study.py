"""Searches over a surface that is known, with the real store and the real sampler."""

from __future__ import annotations

import math

import optuna
import pytest

from tests.builders import MIB
from tests.search.conftest import SMALL, Bench, make_job, plan_of
from tests.search.fakes import FakeWorkers, Point, fail
from zerotune.config.errors import ExitCode, NothingFeasible, RunFailed, UsageError
from zerotune.config.load import load_job
from zerotune.config.schema import JobConfig
from zerotune.records import RunKind, Status
from zerotune.records.events import ConfirmationProgress, SearchFinished, SearchStarted, TrialFinished
from zerotune.schedule.resolve import PREFETCH_BLOCKS
from zerotune.search.best import write_best
from zerotune.search.configuration import canonical_key

BLOCK = 1_000_000


def surface(job: JobConfig) -> Point:
    """The more prefetch the faster, ``keep`` faster still and larger."""
    zero = job.zero
    step = 1.0 - 0.05 * math.log2(1 + zero.prefetch_distance / BLOCK) - 0.1 * (zero.release == "keep")
    step += 0.02 * (zero.reduce_bucket_size > BLOCK)
    peak = 100 * MIB + 40 * MIB * (zero.release == "keep") + 2 * MIB * zero.prefetch_distance // BLOCK
    return Point(step, int(peak))


def test_it_finds_the_best_and_says_by_how_much(real_bench: Bench) -> None:
    result, workers = real_bench(plan_of(make_job(trials=12, confirm_rounds=4)), surface, noise=0.005)
    best = result.best.config.zero
    assert (best.release, best.prefetch_distance, best.reduce_bucket_size) == ("keep", 4 * BLOCK, BLOCK)
    assert result.baseline is not None and result.baseline.trial_number == 0 and result.baseline.is_baseline
    assert result.speedup is not None and not result.is_tie
    truth = surface(result.baseline.config).step_s / surface(result.best.config).step_s
    assert result.speedup.low < truth < result.speedup.high
    assert result.counts == {"complete": 12}
    assert len(workers.trials) == 12
    study = real_bench.store.get_study(result.study)
    assert (study.best, study.speedup, study.is_tie) == (result.best.run_id, result.speedup, False)
    assert study.wall_seconds > 0
    kinds = [type(event) for event in real_bench.events]
    assert (kinds[0], kinds[-1]) == (SearchStarted, SearchFinished)
    assert kinds.count(TrialFinished) == 12
    assert kinds.count(ConfirmationProgress) == 4 * 4


def test_no_configuration_is_measured_twice(bench: Bench) -> None:
    _, workers = bench(plan_of(make_job(trials=16)), surface)
    keys = [canonical_key(job) for job in workers.trials]
    assert len(set(keys)) == len(keys) == 16


def test_a_space_that_is_used_up_ends_the_search(bench: Bench) -> None:
    result, workers = bench(plan_of(make_job(trials=50), SMALL), surface)
    assert result.ended_because == "exhausted"
    assert len(workers.trials) == 8  # 2 x 2 x 2, the defaults among them
    again = bench.search(plan_of(make_job(trials=50), SMALL), fresh := FakeWorkers(surface))
    assert fresh.specs == []
    assert again.best.run_id == result.best.run_id


def test_two_choices_that_resolve_to_the_same_knobs_are_one(bench: Bench) -> None:
    space = "knobs:\n  stage: [0, 3]\n  prefetch_distance: {relative_to: block, values: [0, 1, 4]}\n"
    result, workers = bench(plan_of(make_job(trials=20), space), surface)
    # Prefetching means nothing at stage 0.
    assert len(workers.trials) == 4
    assert result.ended_because == "exhausted"


def test_the_files_own_setting_is_tried_right_after_the_defaults(bench: Bench) -> None:
    job = make_job(trials=4, zero={"prefetch_distance": 123_456, "overlap_comm": False})
    result, workers = bench(plan_of(job), surface)
    first, second = workers.trials[:2]
    assert (first.zero.prefetch_distance, first.zero.overlap_comm) == (PREFETCH_BLOCKS * BLOCK, True)
    assert (second.zero.prefetch_distance, second.zero.overlap_comm) == (123_456, False)
    assert result.trials[1].is_baseline is False


def test_the_fastest_over_the_budget_does_not_win(real_bench: Bench) -> None:
    """S08: a configuration over the limit is measured and shown, and never the winner."""
    result, _ = real_bench(plan_of(make_job(trials=10, memory_budget=120 * MIB)), surface)
    assert result.best.config.zero.release == "after_use"
    assert result.best.feasible is True
    over = [run for run in result.trials if run.feasible is False]
    assert over and all(run.status is Status.COMPLETE for run in over)
    study = optuna.load_study(study_name=result.study, storage=real_bench.store.open_optuna_storage())
    assert study.best_trial.user_attrs["memory_over_budget"] <= 0
    assert {tuple(sorted(trial.constraints)) for trial in study.trials} == {("memory", "time")}


def micro_space() -> str:
    return "knobs:\n  micro_batch_size: {low: 1, high: 64}\n  reduce_bucket_size: {low: 1000, high: 4000000, log: true}\n"


def out_of_memory_above_eight(job: JobConfig) -> Point:
    micro = job.train.micro_batch_size
    assert micro is not None
    if micro > 12:
        raise fail(Status.OOM_DEVICE, "cannot allocate")
    return Point(1.0 / micro + 0.01 * abs(math.log(job.zero.reduce_bucket_size / BLOCK)))


def test_the_sampler_learns_to_keep_away_from_running_out_of_memory(bench: Bench) -> None:
    """S08: the share of trials that run out of memory falls, the best feasible one wins, nothing is a fake number."""
    job = make_job(global_batch=5040, micro=1, trials=30)
    space = micro_space().replace("high: 64", "high: 48")
    result, _ = bench(plan_of(job, space), out_of_memory_above_eight)
    assert result.best.config.train.micro_batch_size == 12
    ooms = [run.status is Status.OOM_DEVICE for run in result.trials]
    early, late = ooms[:15], ooms[15:]
    assert sum(early) > 0
    assert sum(late) < sum(early)
    assert result.counts["oom_device"] == sum(ooms)
    study = optuna.load_study(study_name=result.study, storage=bench.store.open_optuna_storage())
    for trial in study.trials:
        assert trial.values is None or all(math.isfinite(value) and value > 0 for value in trial.values)
        if trial.user_attrs.get("status") == "oom_device":
            assert trial.state is optuna.trial.TrialState.PRUNED
            assert trial.constraints["memory"] > 0
    assert all(run.measurement is None for run in result.trials if run.status is Status.OOM_DEVICE)


def test_a_baseline_out_of_memory_leaves_no_speedup(bench: Bench) -> None:
    """S02a: the first trial has no metric; the first feasible one is the reference."""

    def no_defaults(job: JobConfig) -> Point:
        if job.zero.prefetch_distance == PREFETCH_BLOCKS * BLOCK and job.zero.release == "after_use":
            raise fail(Status.OOM_DEVICE)
        return surface(job)

    result, _ = bench(plan_of(make_job(trials=8)), no_defaults)
    assert result.baseline is not None and result.baseline.status is Status.OOM_DEVICE
    assert result.speedup is None and not result.is_tie
    feasible = [run for run in result.trials if run.measurement]
    assert result.reference == feasible[0].run_id
    assert bench.store.get_study(result.study).speedup is None


def test_out_of_memory_everywhere_is_said_with_exit_code_5(bench: Bench) -> None:
    """S02b."""

    def never(job: JobConfig) -> Point:
        raise fail(Status.OOM_HOST)

    with pytest.raises(NothingFeasible, match="every trial ran out of memory") as ended:
        bench(plan_of(make_job(trials=4)), never)
    assert ended.value.exit_code is ExitCode.NOTHING_FEASIBLE
    assert "4 oom_host" in str(ended.value)


def test_a_budget_that_nothing_meets_names_the_closest(bench: Bench) -> None:
    with pytest.raises(NothingFeasible) as ended:
        bench(plan_of(make_job(memory_budget=60 * MIB), SMALL), surface)
    message = str(ended.value)
    assert "60.0 MiB" in message and "100.0 MiB" in message and "40.0 MiB too much" in message
    assert "prefetch_distance=0" in message
    assert "8 over the memory budget" in message


def test_failures_that_no_knob_would_mend_end_the_search_early(bench: Bench) -> None:
    def broken(job: JobConfig) -> Point:
        raise fail(Status.FAILED, "KeyError: 'tokens'", log_path="/tmp/rank1.log")

    workers = FakeWorkers(broken)
    with pytest.raises(RunFailed, match="KeyError: 'tokens'") as ended:
        bench.search(plan_of(make_job(trials=20)), workers)
    assert "/tmp/rank1.log" in str(ended.value)
    assert len(workers.specs) == 3


def test_hanging_trials_count_and_the_search_goes_on(bench: Bench) -> None:
    """S07: whoever overruns the limit is a trial with a reason, and the next one starts."""

    def hangs_without_prefetch(job: JobConfig) -> Point:
        if job.zero.prefetch_distance == 0:
            raise fail(Status.TIMEOUT, "timed out during backward")
        return surface(job)

    result, _ = bench(plan_of(make_job(), SMALL), hangs_without_prefetch)
    assert result.counts == {"complete": 4, "timeout": 4}
    study = optuna.load_study(study_name=result.study, storage=bench.store.open_optuna_storage())
    hung = [trial for trial in study.trials if trial.user_attrs["status"] == "timeout"]
    assert all(trial.constraints["time"] > 0 and trial.values is None for trial in hung)


def test_a_lost_node_gives_a_configuration_one_more_chance(bench: Bench) -> None:
    lost: list[str] = []

    def node_goes(job: JobConfig) -> Point:
        key = canonical_key(job)
        if job.zero.release == "keep" and lost.count(key) < (2 if job.zero.reduce_bucket_size > BLOCK else 1):
            lost.append(key)
            raise fail(Status.LOST_NODE, "node1 is gone")
        return surface(job)

    result, workers = bench(plan_of(make_job(), SMALL), node_goes)
    keys = [canonical_key(job) for job in workers.trials]
    assert len(set(keys)) == 8 and max(keys.count(key) for key in keys) == 2
    assert result.counts == {"complete": 6, "lost_node": 2}
    assert sum(result.counts.values()) == 8


def test_a_tie_is_called_a_tie(bench: Bench) -> None:
    """Nothing makes a difference, so nothing may be said to."""
    ties = []
    for seed in range(3):
        plan = plan_of(make_job(trials=3, seed=seed, confirm_rounds=6))
        result = bench.search(plan, FakeWorkers(lambda job: Point(1.0), noise=0.01, seed=seed))
        ties.append(result.is_tie)
        assert result.speedup is not None and result.speedup.low < 1.02
    assert sum(ties) >= 2  # the best of three is a little lucky, each interval is a 95 % one


def test_the_baseline_itself_may_win(bench: Bench) -> None:
    def defaults_are_best(job: JobConfig) -> Point:
        is_default = canonical_key(job) == plan.baseline_key
        return Point(0.5 if is_default else 1.0)

    plan = plan_of(make_job(trials=6))
    result, _ = bench(plan, defaults_are_best)
    assert result.best.is_baseline and result.is_tie
    assert result.speedup is not None and result.speedup.value == 1.0


def test_slow_trials_are_cut_short_but_not_below_the_least_steps(bench: Bench) -> None:
    def far_apart(job: JobConfig) -> Point:
        return Point(0.1 if job.zero.release == "keep" else 1.0)

    result, _ = bench(plan_of(make_job(max_steps=60), SMALL), far_apart, noise=0.2)
    cut = [
        run for run in result.trials if run.measurement and run.measurement.stopped_because == "cannot_win"
    ]
    assert cut
    assert all(run.measurement and len(run.measurement.step_times_s) >= 10 for run in result.trials)
    assert all(run.config.zero.release == "after_use" for run in cut)


def test_the_objective_memory_takes_the_smallest_peak(bench: Bench) -> None:
    result, _ = bench(plan_of(make_job(objective="memory"), SMALL), surface)
    assert result.best.measurement is not None
    assert result.best.measurement.peak_memory_bytes == 100 * MIB
    assert result.best.config.zero.reduce_bucket_size == BLOCK  # the faster of the equally small


def test_the_objective_pareto_searches_both(real_bench: Bench) -> None:
    result, _ = real_bench(plan_of(make_job(trials=6, objective="pareto")), surface)
    study = optuna.load_study(study_name=result.study, storage=real_bench.store.open_optuna_storage())
    assert [direction.name for direction in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert all(len(trial.values) == 2 for trial in study.trials)


def test_random_sampling_is_there_to_compare_with(bench: Bench) -> None:
    result, workers = bench(plan_of(make_job(trials=8, sampler="random")), surface)
    assert len({canonical_key(job) for job in workers.trials}) == 8
    assert result.counts == {"complete": 8}


def test_the_same_seed_searches_the_same(bench: Bench, tmp_path) -> None:  # type: ignore[no-untyped-def]
    _, first = bench(plan_of(make_job(trials=9, seed=5), name="one"), surface)
    _, second = bench(plan_of(make_job(trials=9, seed=5), name="two"), surface)
    assert [canonical_key(job) for job in first.trials] == [canonical_key(job) for job in second.trials]


def test_best_yaml_is_what_ran(bench: Bench, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """S09: taken verbatim, it gives the very configuration, every knob a number."""
    result, _ = bench(plan_of(make_job(trials=3)), surface)
    path = write_best(tmp_path, result)
    loaded = load_job(path)
    assert loaded.job == result.best.config
    assert loaded.job.zero.is_resolved and loaded.job.train.micro_batch_size == 4
    text = path.read_text()
    assert (
        "auto" not in text.replace("leaf_modules: auto", "")
        and result.best.run_id in text
        and "Speed-up over the defaults" in text
    )
    assert sorted(entry.name for entry in tmp_path.iterdir() if "best" in entry.name) == ["best.yaml"]


def test_another_question_under_the_same_name_is_refused_before_anything_runs(bench: Bench) -> None:
    """S05."""
    bench(plan_of(make_job(trials=4), name="mine"), surface)
    other_space = "knobs:\n  prefetch_distance: {relative_to: block, values: [0, 1, 2, 4, 8]}\n"
    for changed in (
        plan_of(make_job(trials=4), other_space, name="mine"),
        plan_of(make_job(trials=4, objective="memory"), name="mine"),
        plan_of(make_job(trials=4, memory_budget=5), name="mine"),
    ):
        workers = FakeWorkers(surface)
        with pytest.raises(UsageError, match="another question"):
            bench.search(changed, workers)
        assert workers.specs == []
    assert len(bench.store.runs(study="mine", kind=RunKind.TRIAL)) == 4


def test_without_a_name_another_question_is_another_study(bench: Bench) -> None:
    first, _ = bench(plan_of(make_job(trials=4)), surface)
    second, _ = bench(plan_of(make_job(trials=4, memory_budget=200 * MIB)), surface)
    assert first.study != second.study


def test_a_candidate_that_fails_when_measured_again_drops_out(bench: Bench) -> None:
    state = {"confirming": False}

    class Fragile(FakeWorkers):
        def run(self, spec, limits, on_progress):  # type: ignore[no-untyped-def]
            state["confirming"] = not spec.profile_memory
            return super().run(spec, limits, on_progress)

    def breaks_later(job: JobConfig) -> Point:
        if state["confirming"] and (job.zero.release, job.zero.prefetch_distance) == (
            "keep",
            PREFETCH_BLOCKS * BLOCK,
        ):
            raise fail(Status.OOM_DEVICE)
        return surface(job)

    result = bench.search(plan_of(make_job(), SMALL), Fragile(breaks_later))
    best = result.best.config.zero
    assert (best.release, best.prefetch_distance) == ("after_use", PREFETCH_BLOCKS * BLOCK)
    again = bench.search(plan_of(make_job(), SMALL), later := Fragile(breaks_later))
    assert later.specs == [] and again.best.run_id == result.best.run_id

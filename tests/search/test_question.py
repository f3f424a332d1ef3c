from __future__ import annotations

import pytest

from tests.builders import make_cluster, make_config, make_study, make_workload
from zerotune.config.errors import ExitCode, UsageError
from zerotune.config.schema import JobConfig
from zerotune.records import Fingerprint
from zerotune.search.question import check_same_question, question, study_name

SPACE = {"name": "quick", "dimensions": [{"knob": "micro_batch_size", "values": [1, 2, 4]}]}


def ask(job: JobConfig | None = None, space: dict | None = None, **facts: Fingerprint) -> Fingerprint:
    workload = facts.get("workload", make_workload())
    return question(job or make_config(), space or SPACE, workload, facts.get("cluster", make_cluster()))


def with_search(**values: object) -> JobConfig:
    job = make_config()
    return job.model_copy(update={"search": job.search.model_copy(update=values)})


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        (ask(space={"name": "quick", "dimensions": [{"knob": "micro_batch_size", "values": [1, 2, 4, 8]}]}), "space"),
        (ask(with_search(objective="memory")), "objective: throughput in the study, memory now"),
        (ask(with_search(memory_budget=100)), "memory_budget: none in the study, 100 now"),
        (ask(with_search(seed=3)), "sampler.seed: 0 in the study, 3 now"),
        (ask(with_search(max_steps=50)), "measuring.max_steps"),
        (ask(workload=make_workload(sequence_length=64)), "workload.sequence_length"),
        (ask(cluster=make_cluster(nodes=2)), "cluster.nodes: 1 in the study, 2 now"),
        (ask(make_config(overlap_comm=False)), "zero.overlap_comm: True in the study, False now"),
    ],
)  # fmt: skip
def test_another_question_is_refused_and_the_difference_shown(changed: Fingerprint, place: str) -> None:
    study = make_study("mine", fingerprint=ask())
    with pytest.raises(UsageError, match="another question") as refused:
        check_same_question(study, changed)
    assert place in str(refused.value)
    assert "--study" in str(refused.value)
    assert refused.value.exit_code is ExitCode.USAGE


def test_more_trials_time_and_patience_ask_the_same() -> None:
    patient = with_search(trials=99, time=60.0, trial_timeout=1.0, confirm_rounds=3)
    check_same_question(make_study("mine", fingerprint=ask()), ask(patient))


def test_the_name_can_be_read_and_tells_questions_apart() -> None:
    job = make_config()
    here, there = ask(job), ask(job, cluster=make_cluster(nodes=2))
    assert study_name(job, make_cluster(), here).startswith("gpt-throughput-1x2-")
    assert study_name(job, make_cluster(nodes=2), there) != study_name(job, make_cluster(), here)

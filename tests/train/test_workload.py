import subprocess
import sys

import pytest

from tests.train.contexts import TINY_GPT, make_job
from zerotune.config.errors import UsageError
from zerotune.config.schema import JobConfig
from zerotune.train.workload import workload_fingerprint


def changed(job: JobConfig, **sections) -> JobConfig:
    return JobConfig.model_validate(
        job.model_dump() | {k: job.model_dump()[k] | v for k, v in sections.items()}
    )


JOB = make_job()


@pytest.mark.parametrize(
    "change",
    [
        {"zero": {"stage": 0}},
        {"zero": {"prefetch_distance": 5}},
        {"train": {"micro_batch_size": 2}},
        {"train": {"steps": 7}},
        {"train": {"seed": 7}},
        {"train": {"save_every": 7}},
        {"train": {"save_async": True}},
        {"cluster": {"nodes": 2}},
        {"search": {"trials": 3}},
    ],
    ids=str,
)
def test_knobs_steps_and_seed_are_no_part_of_it(change):
    assert workload_fingerprint(changed(JOB, **change)) == workload_fingerprint(JOB)


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"global_batch_size": 8}},
        {"train": {"precision": "bf16"}},
        {"train": {"optimizer": {"name": "sgd"}}},
        {"train": {"lr_schedule": {"name": "cosine"}}},
        {"train": {"clip_norm": 1.0}},
        {"train": {"precision": "fp16"}},
        {"data": {"synthetic": {"pad_fraction": 0.5}}},
        {"model": {"gpt": {**TINY_GPT["gpt"], "layers": 3}}},
    ],
    ids=str,
)
def test_what_is_trained_is(change):
    assert workload_fingerprint(changed(JOB, **change)).key != workload_fingerprint(JOB).key


def test_defaults_written_out_are_the_same_workload():
    written = JobConfig.model_validate(JOB.model_dump(mode="json"))
    assert workload_fingerprint(written) == workload_fingerprint(JOB)


def test_source_of_factories_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = set()
    for body in ("1", "2"):
        (tmp_path / "m.py").write_text(body)
        (tmp_path / "d.py").write_text("same")
        keys.add(workload_fingerprint(make_job({"factory": "m.py:f"}, {"factory": "d.py:f"})).key)
    (tmp_path / "d.py").write_text("other")
    keys.add(workload_fingerprint(make_job({"factory": "m.py:f"}, {"factory": "d.py:f"})).key)
    for body in ("{}", "{ }"):
        (tmp_path / "config.json").write_text(body)
        keys.add(workload_fingerprint(make_job({"hf": {"folder": "."}})).key)
        (tmp_path / "t.json").write_text(body)
        keys.add(workload_fingerprint(make_job(data={"text": {"tokenizer": "t.json"}})).key)
    assert len(keys) == 7


def test_missing_files_are_named():
    with pytest.raises(UsageError, match=r"model.hf.folder: cannot read absent/config.json"):
        workload_fingerprint(make_job({"hf": {"folder": "absent"}}))


def test_needs_no_torch():
    code = "import sys, zerotune.train.workload, zerotune.train.measure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({"precision": "bf16"}, {"gradient_dtype": "compute"}),
        ({"precision": "bf16"}, {"reduce_dtype": "fp32"}),
        ({"precision": "fp16"}, {"loss_scale": {"growth_interval": 100}}),
        ({"clip_norm": 1.0}, {"clip_norm_type": "inf"}),
    ],
    ids=str,
)
def test_dtypes_and_norms_count_where_they_act(base, change):
    key = workload_fingerprint(changed(JOB, train=base)).key
    assert workload_fingerprint(changed(JOB, train=base | change)).key != key
    idle = workload_fingerprint(changed(JOB, train=change)).key
    assert idle == workload_fingerprint(JOB).key

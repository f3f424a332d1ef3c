"""What is written reads back equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.config.dump import dump_job
from zerotune.config.load import read_job
from zerotune.config.schema import JobConfig

SIZES = st.integers(0, 10**18)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
TRICKY = st.sampled_from(
    ["5e7", "no", "null", "~", "1_000", "2020-01-01", "a: b", "# x", "", " ", "*x", "0x1f", "yes", "\t"]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXTS | TRICKY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
POSITIVE = st.integers(1, 10**6)
UNIT = st.floats(0, 0.99)
SECONDS = st.just(0.0) | st.floats(1e-3, 1e9)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


MODELS = st.one_of(
    st.builds(
        lambda layers, heads, width, dropout, tie: {
            "gpt": {"layers": layers, "heads": heads, "d_model": heads * width, "dropout": dropout, "tie_embeddings": tie}
        },
        POSITIVE, st.integers(1, 64), st.integers(1, 64), UNIT, st.booleans(),
    ),
    st.builds(lambda ff, theta: {"llama": {"d_ff": ff, "rope_theta": theta}}, optional(POSITIVE), st.floats(1e-3, 1e9)),
    st.builds(lambda config: {"hf": {"config": config}}, st.dictionaries(TEXTS, JSON, max_size=3)),
    st.builds(lambda folder: {"hf": {"folder": folder}}, TEXTS | TRICKY),
    st.builds(lambda args: {"factory": {"factory": "a/b.py:fn", "args": args}}, st.dictionaries(TEXTS, JSON, max_size=3)),
)  # fmt: skip
DATA = st.one_of(
    st.builds(
        lambda paths, pattern, tokenizer: {"text": {"paths": paths, "pattern": pattern, "tokenizer": tokenizer}},
        st.lists(TEXTS | TRICKY, min_size=1, max_size=3), TEXTS | TRICKY, optional(TEXTS),
    ),
    st.builds(lambda share: {"synthetic": {"pad_fraction": share}}, UNIT),
)  # fmt: skip
OPTIMIZERS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["adamw", "sgd"]),
        "lr": st.floats(0, 10),
        "betas": st.tuples(UNIT, UNIT),
        "eps": st.floats(1e-12, 1),
        "momentum": UNIT,
    },
)
KNOBS = st.fixed_dictionaries(
    {},
    optional={
        "stage": st.sampled_from([0, 3]),
        "unit_size": st.just("block") | st.integers(1, 10**18),
        "allgather_bucket_size": st.just("auto") | SIZES,
        "prefetch_distance": st.just("auto") | SIZES,
        "param_persistence_threshold": st.just("auto") | SIZES,
        "release": st.sampled_from(["after_use", "keep"]),
        "max_reuse_distance": optional(SIZES),
        "memory_budget": optional(SIZES),
        "max_live_parameters": optional(SIZES),
        "overlap_comm": st.booleans(),
    },
)
JOBS = st.builds(
    lambda model, data, optimizer, micro, accumulation, clip, zero, address, wait, budget, time: JobConfig.model_validate(
        {
            "model": model,
            "data": data,
            "train": {
                "optimizer": optimizer,
                "global_batch_size": (micro or 1) * accumulation,
                "micro_batch_size": micro,
                "clip_norm": clip,
            },
            "zero": zero,
            "cluster": {"address": address, "wait": wait},
            "search": {"memory_budget": budget, "time": time},
        }
    ),
    MODELS, DATA, OPTIMIZERS, optional(st.integers(1, 64)), st.integers(1, 64), optional(st.floats(1e-6, 1e6)), KNOBS,
    optional(TEXTS | TRICKY), SECONDS, optional(SIZES), optional(SECONDS),
)  # fmt: skip


@given(JOBS, st.lists(TEXTS, max_size=3))
@settings(max_examples=60, deadline=None)
def test_reads_back_equal(job: JobConfig, header: list[str]) -> None:
    assert read_job(dump_job(job, header)).job == job


def test_infinity_in_what_is_handed_on_comes_back() -> None:
    """Some transformers configurations hold it (``time_step_limit: [0.0, .inf]``)."""
    model = {"hf": {"config": {"model_type": "mamba2", "time_step_limit": [0.0, float("inf")]}}}
    job = JobConfig.model_validate({"model": model})
    assert read_job(dump_job(job)).job == job
    assert JobConfig.model_validate(job.model_dump(mode="json")) == job


def test_writes_every_default_in_the_order_of_the_schema() -> None:
    text = dump_job(JobConfig.model_validate({"model": {"gpt": {}}}), ["best of study s", "1.10x"])
    lines = text.splitlines()
    assert lines[:3] == ["# best of study s", "# 1.10x", ""]
    knobs = lines[lines.index("zero:") + 1 : lines.index("cluster:")]
    assert [line.split(":")[0].strip() for line in knobs] == [
        "stage", "unit_size", "allgather_bucket_size", "prefetch_distance", "backward_prefetch_distance",
        "param_persistence_threshold", "release", "reduce_bucket_size", "overlap_comm",
    ]  # fmt: skip
    assert "llama" not in text and "null" not in text
    assert "    lr: 0.0003" in lines


@pytest.mark.parametrize("zero", [{}, {"stage": 0}, {"release": "reuse", "max_reuse_distance": 5}])
def test_what_is_written_gives_no_warning(zero: dict[str, Any]) -> None:
    job = JobConfig.model_validate({"model": {"llama": {}}, "zero": zero})
    assert read_job(dump_job(job)).warnings == []

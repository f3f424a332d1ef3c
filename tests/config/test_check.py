"""Values without effect, and the batch plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.config.check import BatchPlan, batch_plan
from zerotune.config.errors import UsageError
from zerotune.config.knobs import REGISTRY
from zerotune.config.load import read_job

GPT = "model: {gpt: {}}\n"


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            "zero: {max_reuse_distance: 5}",
            "1:28: zero.max_reuse_distance: has no effect with release: after_use",
        ),
        (
            "zero: {memory_budget: 5GiB}",
            "1:23: zero.memory_budget: has no effect with release: after_use, only with release: planned; remove",
        ),
        (
            "train: {gradient_dtype: compute}",
            "1:25: train.gradient_dtype: has no effect with precision fp32; remove it",
        ),
        (
            "train: {reduce_dtype: fp32}",
            "1:23: train.reduce_dtype: has no effect with precision fp32; remove it",
        ),
        (
            "train: {precision: bf16, loss_scale: {initial: 8}}",
            "1:48: train.loss_scale.initial: has no effect with precision bf16, only with fp16; remove it",
        ),
        (
            "train: {clip_norm_type: inf}",
            "1:25: train.clip_norm_type: clips nothing without train.clip_norm; add it",
        ),
        (
            "train: {accumulate: local}\nzero: {stage: 1}",
            "1:21: train.accumulate: has no effect at stage 1, it acts at stages 0, 2 and 3",
        ),
        ("train: {optimizer: {momentum: 0.9}}", "1:31: train.optimizer.momentum: has no effect with adamw"),
        ("train: {optimizer: {name: sgd, eps: 1}}", "1:37: train.optimizer.eps: has no effect with sgd"),
        (
            "train: {optimizer: {name: sgd, betas: [0.1, 0.2]}}",
            "1:32: train.optimizer.betas: has no effect with sgd",
        ),
        (
            "train: {lr_schedule: {decay_steps: 5}}",
            "1:36: train.lr_schedule.decay_steps: has no effect with a constant",
        ),
        (
            "train: {lr_schedule: {min_ratio: 0.5}}",
            "1:34: train.lr_schedule.min_ratio: has no effect with a constant",
        ),
        (
            "train: {lr_schedule: {name: cosine, min_ratio: 1}}",
            "1:29: train.lr_schedule.name: cosine has no effect with min_",
        ),
        (
            "train: {optimizer: {lr: 0, weight_decay: 1}}",
            "1:42: train.optimizer.weight_decay: has no effect with lr 0",
        ),
    ],
)
def test_a_value_without_effect_is_named(text: str, warning: str) -> None:
    found = read_job(text + "\n" + GPT).warnings
    assert len(found) == 1 and found[0].startswith(f"model.yaml:{warning}"), found


KNOBS_OF_STAGE_3 = [info for info in REGISTRY.values() if info.section == "zero" and 0 not in info.stages]


@pytest.mark.parametrize("info", KNOBS_OF_STAGE_3, ids=lambda info: info.name)
def test_knobs_of_stage_3_at_stage_0(info: object) -> None:
    name, example = info.name, info.example  # type: ignore[attr-defined]
    found = read_job(f"{GPT}zero:\n  stage: 0\n  {name}: {example}\n").warnings
    assert len(found) == 1
    assert found[0].startswith(
        f"model.yaml:4:{len(name) + 5}: zero.{name}: has no effect at stage 0, it acts at stage"
    )


def test_no_warning_for_defaults_or_for_what_acts() -> None:
    text = """
train: {optimizer: {name: sgd, momentum: 0.9, betas: [0.9, 0.95]}, lr_schedule: {name: cosine, decay_steps: 5}}
zero: {stage: 0, prefetch_distance: auto, reduce_bucket_size: 5, overlap_comm: false}
"""
    assert read_job(GPT + text).warnings == []


def test_warnings_of_options_name_them() -> None:
    assert (
        read_job(GPT, sets=["train.optimizer.momentum=0.9"])
        .warnings[0]
        .startswith("--set train.optimizer.momentum=0.9: ")
    )


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_a_plan_covers_the_global_batch(ranks: int, micro: int, accumulation: int) -> None:
    whole = ranks * micro * accumulation
    assert batch_plan(whole, ranks, micro) == BatchPlan(micro, accumulation)
    assert batch_plan(whole, ranks, None) == BatchPlan(micro * accumulation, 1)


@given(st.integers(1, 500), st.integers(1, 20), st.none() | st.integers(1, 50))
def test_a_plan_divides_or_is_refused(whole: int, ranks: int, micro: int | None) -> None:
    try:
        plan = batch_plan(whole, ranks, micro)
    except UsageError as error:
        assert whole % (ranks * (micro or 1)) != 0
        assert error.remedy is not None
    else:
        assert plan.micro_batch_size * plan.accumulation * ranks == whole


def test_refusals_say_which_sizes_divide() -> None:
    with pytest.raises(
        UsageError,
        match=r"8 does not divide over 3 ranks \(use a global batch of 6 or 9, or 1, 2, 4 or 8 ranks",
    ):
        batch_plan(8, 3, None)
    with pytest.raises(
        UsageError, match=r"use a micro_batch_size of 1, 2 or 4, or a global batch of 6 or 12"
    ):
        batch_plan(8, 2, 3)
    with pytest.raises(UsageError, match="a global batch of 8"):
        batch_plan(4, 8, None)

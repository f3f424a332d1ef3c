"""fp16 and bf16: loss scaling, steps that are skipped on every rank, and what checkpoints keep of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.zero.jobs import Case as TrainCase
from tests.zero.jobs import make_model, make_optimizer, mean_loss, micro_batches, train_plain
from zerotune.config.errors import RunFailed, UsageError
from zerotune.config.knobs import Knobs
from zerotune.zero.precision import Precision
from zerotune.zero.scaler import LossScaler, LossScaling, RankTrouble, SkippedSteps, in_words


def make_engine(precision: str, knobs: dict[str, Any], optimizer: str = "sgd", **settings: Any) -> Any:
    import zerotune

    module = make_model("gpt")
    return zerotune.ZeroEngine(
        module,
        make_optimizer(optimizer, module.parameters()),
        Knobs(**knobs),
        precision=precision,
        **settings,
    )


def take_step(
    engine: Any, rank: int, size: int, step: int, spoil: float | None = None, weight: float = 1.0
) -> Any:
    for x, y in micro_batches(rank, size, 2, step):
        loss = mean_loss(engine(x), y)
        engine.backward(loss if spoil is None else loss * spoil, weight)
    return engine.step()


# ------------------------------------------------------------------------------------------------ skipped steps


def one_rank_spoils(rank: int, size: int, precision: str, settings: list[dict[str, Any]]) -> list[Any]:
    """Rank 1's gradient is not finite in step 2; the other steps are ordinary."""
    answers = []
    for setting in settings:
        spoil = setting["spoil"]
        engine = make_engine(
            precision,
            {"stage": setting["stage"]},
            clip_norm=setting["clip"],
            clip_norm_type=setting["type"],
            loss_scaling=LossScaling(initial=256.0),
        )
        results, states = [], []
        for step in range(4):
            results.append(take_step(engine, rank, size, step, spoil if step == 2 and rank == 1 else None))
            states.append(engine.full_state_dict())
        same = all(torch.equal(states[2][k], states[1][k]) for k in states[1])
        moved = any(not torch.equal(states[3][k], states[2][k]) for k in states[1])
        answers.append(
            ([r.skipped for r in results], [r.loss_scale for r in results], same, moved, engine.skipped_steps)
        )
        engine.close()
    return answers


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(precision: str) -> None:
    settings = [
        {"stage": stage, "spoil": spoil, "clip": clip, "type": norm_type}
        for stage, spoil, clip, norm_type in [
            (3, math.nan, 0.5, 2),
            (3, math.inf, None, "inf"),
            (2, math.nan, 0.5, "inf"),
            (1, math.inf, None, 2),
            (0, math.nan, None, 2),
        ]
    ]
    for answers in run_on_ranks(2, one_rank_spoils, precision, settings):
        for answer, setting in zip(answers, settings, strict=True):
            skipped, scales, same, moved, total = answer
            assert skipped == [False, False, True, False], setting
            assert same and moved and total == 1, setting
            assert scales == ([256.0, 256.0, 256.0, 128.0] if precision == "fp16" else [1.0] * 4), setting


def always_spoiled(rank: int, size: int, limit: int, stage: int) -> str:
    engine = make_engine("bf16", {"stage": stage}, max_skipped_steps=limit)
    take_step(engine, rank, size, 0)
    if rank == 1:  # only its gradient: the loss stays a number
        engine.module.blocks[1].mlp.register_full_backward_pre_hook(
            lambda module, grads: (grads[0] * math.inf,)
        )
    try:
        for step in range(1, 10):
            take_step(engine, rank, size, step)
    except RunFailed as error:
        message = str(error)
        engine.flush()
        engine.close()
        return message
    raise AssertionError("it went on")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_too_many_in_a_row_end_the_run_by_name(stage: int) -> None:
    messages = run_on_ranks(3, always_spoiled, 3, stage)
    assert messages[0] == messages[1] == messages[2]
    assert messages[0].startswith("step 3 was skipped, the last of 3 in a row: not finite: ")
    assert "on rank 1" in messages[0] and "rank 0" not in messages[0] and "rank 2" not in messages[0]
    assert "the gradient of " in messages[0]


def test_words_for_who_is_to_blame() -> None:
    slices = [
        RankTrouble(0, False, None, True),
        RankTrouble(1, False, None, False),
        RankTrouble(2, False, None, True),
    ]
    assert in_words(slices) == "the gradient summed over ranks is not finite in the slices of ranks 0, 2"
    both = [RankTrouble(3, True, "head.weight", True)]
    assert in_words(both) == "not finite: the loss and the gradient of head.weight on rank 3"
    with pytest.raises(RunFailed, match=r"step 7 was skipped, at loss scale 4: .*rank 3"):
        skipped = SkippedSteps(1)
        skipped.note(True)
        skipped.fail_if_too_many(7, both, 4.0)


# ------------------------------------------------------------------------------------------------- loss scaling


def test_the_scale_halves_doubles_and_stops_at_its_floor() -> None:
    scaler = LossScaler(LossScaling(initial=4.0, growth_interval=2))
    seen = []
    for skipped in (True, True, True, False, False, False, False, True):
        scaler.update(skipped, 1.0)
        seen.append(scaler.scale)
    assert seen == [2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 2.0]
    fixed = LossScaler(None)
    fixed.update(True, 5.0)
    assert fixed.factor == fixed.scale == 1.0


def test_the_weight_of_a_step_is_taken_out_of_the_scale() -> None:
    scaler = LossScaler(LossScaling(initial=16.0))
    scaler.update(True, 5000.0)  # the reference alone has lowered it: no backoff
    assert scaler.scale == 16.0 and scaler.factor == 16.0 / 4096
    scaler.update(True, 5000.0)
    assert scaler.scale == 8.0


@pytest.mark.parametrize(
    "values", [{"initial": 0.5}, {"growth": 0.5}, {"backoff": 1.0}, {"initial": math.inf}]
)
def test_settings_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="out of range"):
        LossScaling(**values)  # type: ignore[arg-type]


def test_unknown_words_are_refused() -> None:
    for words in (("fp8",), ("bf16", "bf16"), ("bf16", "fp32", "fp16")):
        with pytest.raises(UsageError, match="is not known"):
            Precision.of(*words)


def test_a_window_that_another_precision_left_open_keeps_its_scale() -> None:
    saved = LossScaler(LossScaling(initial=8.0)).state()
    for settings, after in ((None, 1.0), (LossScaling(initial=8.0, growth_interval=1), 16.0)):
        scaler = LossScaler(settings)
        scaler.load(saved)
        assert scaler.factor == 8.0
        scaler.update(False, 1.0)
        assert scaler.scale == after
    scaler = LossScaler(LossScaling(initial=32.0))
    scaler.load(LossScaler(None).state())
    assert scaler.factor == 1.0
    scaler.update(False, 1.0)
    assert scaler.factor == 32.0


def fp16_losses(rank: int, size: int, settings: list[dict[str, Any]], steps: int) -> list[Any]:
    answers = []
    for setting in settings:
        engine = make_engine(
            "fp16", setting, "adamw", loss_scaling=LossScaling(initial=1024.0, growth_interval=4)
        )
        results = [take_step(engine, rank, size, step, weight=64.0) for step in range(steps)]
        answers.append(([r.loss for r in results], [r.grad_norm for r in results], engine.full_state_dict()))
        answers[-1] = (*answers[-1], results[-1].loss_scale, engine.skipped_steps)
        engine.close()
    return answers


def test_fp16_learns_and_keeps_its_bits_over_knobs() -> None:
    steps = 20
    settings = [
        {"stage": 3},
        {"stage": 0},
        {"stage": 2},
        {"stage": 3, "release": "keep", "reduce_bucket_size": 500},
    ]
    plain = train_plain(TrainCase(optimizer="adamw", steps=steps))
    first = None
    for answers in run_on_ranks(2, fp16_losses, settings, steps):
        for losses, norms, state, scale, skipped in answers:
            first = first or (losses, norms, state)
            assert losses == first[0] and norms == first[1] and skipped == 0
            assert all(torch.equal(state[k], first[2][k]) for k in state)
            assert scale == 1024.0 * 2**4
            assert losses == pytest.approx(plain.losses, abs=0.05)
            assert norms[:3] == pytest.approx(plain.norms[:3], rel=0.02)


def saved_and_resumed(rank: int, size: int, folder: str) -> None:
    """Save in the middle of a window, after the scale has moved; go on in another engine bit for bit."""
    scaling = LossScaling(initial=2.0**40, growth_interval=2, backoff=2.0**-14)
    engine = make_engine("fp16", {}, "adamw", loss_scaling=scaling)
    results = [take_step(engine, rank, size, step) for step in range(5)]
    assert [r.skipped for r in results][:1] == [True]
    batches = list(micro_batches(rank, size, 2, 5))
    engine.backward(mean_loss(engine(batches[0][0]), batches[0][1]))
    engine.save(folder)
    other = make_engine("fp16", {}, "adamw", loss_scaling=scaling)
    other.load(folder)
    ends = []
    for each in (engine, other):
        each.backward(mean_loss(each(batches[1][0]), batches[1][1]))
        result = each.step()
        ends.append((result, take_step(each, rank, size, 6), each.full_state_dict()))
    assert ends[0][:2] == ends[1][:2]
    assert ends[0][0].loss_scale != 2.0**40
    assert all(torch.equal(ends[0][2][k], ends[1][2][k]) for k in ends[0][2])
    engine.close()
    other.close()


def test_the_scale_is_saved_and_an_open_window_goes_on(tmp_path: Path) -> None:
    run_on_ranks(2, saved_and_resumed, str(tmp_path))


def dtype_that_travels(rank: int, size: int, settings: list[dict[str, Any]]) -> list[dict[str, float]]:
    answers = []
    for setting in settings:
        engine = make_engine("bf16", {"param_persistence_threshold": 0}, **setting)
        take_step(engine, rank, size, 0)
        engine.begin_ledger()
        take_step(engine, rank, size, 1)
        ledger = engine.end_ledger()
        rates = {}
        for purposes in (("forward", "backward"), ("gradient",)):
            entries = [e for e in ledger.collectives if e.purpose in purposes]
            share = sum(e.elements for e in entries) * (size - 1) / size
            rates[purposes[-1]] = sum(e.sent_bytes for e in entries) / share
        answers.append(rates)
        engine.close()
    return answers


def test_gathers_travel_in_the_compute_dtype_and_reduces_in_theirs() -> None:
    settings = [{}, {"reduce_dtype": "fp32"}, {"gradient_dtype": "compute"}]
    for answers in run_on_ranks(2, dtype_that_travels, settings):
        assert answers == [
            {"backward": 2, "gradient": 2},
            {"backward": 2, "gradient": 4},
            {"backward": 2, "gradient": 2},
        ]

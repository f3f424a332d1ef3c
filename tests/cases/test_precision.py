"""E13: low-precision arithmetic. Reductions, accumulation, master weights and optimizer state, against hand-made sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_on_ranks
from zerotune.config.knobs import Knobs
from zerotune.zero.scaler import LossScaling

STAGES = (0, 1, 2, 3)
LIMIT_S = 180.0


class Weights(nn.Module):
    """``loss(x) = sum(w * x)``, so that the gradient of ``w`` is ``x``."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((5,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def build(value: float, optimizer: Any, **settings: Any) -> Any:
    import zerotune

    model = Weights(value)
    knobs = Knobs(param_persistence_threshold=0, stage=settings.pop("stage", 3))
    return zerotune.ZeroEngine(model, optimizer(model.parameters()), knobs, **settings)


def train_on(engine: Any, *gradients: float) -> Any:
    """One step on micro-batches of these gradients."""
    for gradient in gradients:
        engine.backward(engine(torch.full((5,), gradient)))
    return engine.step()


def sgd(lr: float) -> Any:
    return lambda params: torch.optim.SGD(params, lr=lr)


def weights_of(engine: Any) -> torch.Tensor:
    value = engine.full_state_dict()["w"]
    engine.close()
    return value


# ------------------------------------------------------------------------------------------------------------ (a)


def small_steps(rank: int, size: int, steps: int) -> torch.Tensor:
    engine = build(1.0, sgd(1e-4), precision="bf16")
    for _ in range(steps):
        train_on(engine, 1.0)
    return weights_of(engine)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1000), (2, 100)])
def test_a_a_thousand_steps_of_1e_4_move_a_bf16_weight_by_a_tenth(ranks: int, steps: int) -> None:
    for value in run_on_ranks(ranks, small_steps, steps, limit=LIMIT_S):
        expected = torch.ones(5)
        for _ in range(steps):
            expected -= 1e-4
        assert torch.allclose(value, expected, rtol=1e-6)
        assert float(value[0]) == pytest.approx(1 - steps * 1e-4, abs=1e-4)


# ------------------------------------------------------------------------------------------------------------ (b)


def cancelling(rank: int, size: int, settings: list[dict[str, Any]]) -> list[torch.Tensor]:
    answers = []
    for setting in settings:
        engine = build(0.0, sgd(1.0), precision="bf16", **setting)
        train_on(engine, (1.0, 1e-3, -1.0)[rank])
        answers.append(weights_of(engine))
    return answers


def test_b_gradients_that_cancel_over_ranks_are_summed_in_fp32() -> None:
    settings = [{"stage": stage, "reduce_dtype": dtype} for stage in STAGES for dtype in ("compute", "fp32")]
    small = torch.tensor(1e-3).bfloat16().float()
    for answers in run_on_ranks(3, cancelling, settings, limit=LIMIT_S):
        for value, setting in zip(answers, settings, strict=True):
            # 1 + small is rounded to fp32 on the way.
            expected = -((1.0 + small) - 1.0) / 3
            assert torch.allclose(value, expected.expand(5), rtol=1e-6), setting
            assert torch.allclose(value, (-small / 3).expand(5), rtol=1e-4), setting


# ------------------------------------------------------------------------------------------------------------ (c)


def accumulating(rank: int, size: int, settings: list[dict[str, Any]]) -> list[torch.Tensor]:
    answers = []
    for setting in settings:
        engine = build(0.0, sgd(1.0), precision="bf16", **setting)
        train_on(engine, *[1e-3] * 63)
        answers.append(weights_of(engine))
    return answers


def test_c_micro_batches_accumulate_in_fp32() -> None:
    every = [{"stage": stage} for stage in STAGES]
    local = [setting | {"accumulate": "local"} for setting in every]
    exact = [setting | {"reduce_dtype": "fp32"} for setting in [*every, *local]]
    in_compute = [{"stage": 3, "gradient_dtype": "compute"}]
    settings = [*every, *local, *exact, *in_compute]
    small = torch.tensor(1e-3).bfloat16()
    total = torch.zeros(())
    for _ in range(63):
        total += small.float()
    for answers in run_on_ranks(2, accumulating, settings, limit=LIMIT_S):
        for value, setting in zip(answers, settings, strict=True):
            is_local = setting.get("accumulate") == "local" or setting["stage"] == 1
            if setting in in_compute:  # bf16 sums drift, which is why they are not the default
                assert not torch.allclose(value, -total / 63, rtol=2e-3)
            elif is_local and setting not in exact:  # the sum itself is rounded once, as it travels
                assert torch.equal(value[0], -(2 * total.bfloat16().float()) / 126), setting
            else:
                assert torch.allclose(value, (-total / 63).expand(5), rtol=1e-6), setting


# ------------------------------------------------------------------------------------------------------------ (d)


def dtypes(rank: int, size: int, stage: int, precision: str, gradient: str) -> dict[str, set[torch.dtype]]:
    engine = build(
        1.0,
        torch.optim.AdamW,
        stage=stage,
        precision=precision,
        gradient_dtype=gradient,
        loss_scaling=LossScaling(initial=8.0),
    )
    computed: set[torch.dtype] = set()
    engine.module.register_forward_hook(
        lambda module, args, output: computed.update({output.dtype, args[0].dtype})
    )
    train_on(engine, 0.25)
    engine.backward(engine(torch.full((5,), 0.25)))
    engine.flush()
    params = engine.shards.params
    grads = [p.param.grad if stage == 1 else p.grad for p in params]
    answer = {
        "compute": computed | {p.rows.dtype for p in params} | {p.shard.dtype for p in params},
        "master": {p.master.dtype for p in params},
        "moments": {v.dtype for s in engine.optimizer.state.values() for k, v in s.items() if k != "step"},
        "gradient": {g.dtype for g in grads},
        "state": {v.dtype for v in engine.full_state_dict().values()},
    }
    engine.close()
    return answer


@pytest.mark.parametrize("stage", STAGES)
def test_d_masters_moments_and_gradients_are_fp32(stage: int) -> None:
    fp32 = {torch.float32}
    for precision, low in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for gradient, kept in (("fp32", torch.float32), ("compute", low)):
            for answer in run_on_ranks(2, dtypes, stage, precision, gradient):
                assert answer["compute"] == {low}
                assert answer["master"] == answer["moments"] == answer["state"] == fp32
                assert answer["gradient"] == {kept}


# ------------------------------------------------------------------------------------------------------------ (e)


def large(
    rank: int, size: int, settings: list[dict[str, Any]]
) -> list[tuple[torch.Tensor, list[tuple[bool, float]]]]:
    answers = []
    for setting in settings:
        engine = build(0.0, sgd(1.0), precision="fp16", **setting)
        history = []
        while not history or history[-1][0]:
            result = train_on(engine, (6.0e4, 5.9e4, 6.1e4)[rank])
            history.append((result.skipped, result.loss_scale))
        answers.append((weights_of(engine), history))
    return answers


def test_e_fp16_gradients_near_the_largest_number_are_averaged() -> None:
    settings = [{"stage": stage, "loss_scaling": LossScaling(initial=8.0)} for stage in STAGES]
    settings.append({"stage": 3})
    whole = sum(torch.tensor(x).half().float() for x in (6.0e4, 5.9e4, 6.1e4))
    for answers in run_on_ranks(3, large, settings, limit=LIMIT_S):
        for (value, history), setting in zip(answers, settings, strict=True):
            assert torch.allclose(value, (-whole / 3).expand(5), rtol=1e-6), setting
            first = 8.0 if "loss_scaling" in setting else 2.0**16
            scales = [scale for _, scale in history]
            assert scales == [first / 2**i for i in range(len(scales))] and scales[-1] == 1.0
            assert [skipped for skipped, _ in history] == [True] * (len(history) - 1) + [False]

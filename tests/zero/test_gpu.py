"""The engine on a CUDA device; skipped without one."""

from __future__ import annotations

import pytest
import torch

from tests.zero.jobs import batch, make_model, make_optimizer, mean_loss
from zerotune.config.knobs import Knobs
from zerotune.engine import RankGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(
    precision: str, knobs: dict[str, object], steps: int = 8
) -> tuple[list[float], dict[str, torch.Tensor]]:
    import zerotune

    device = torch.device("cuda", 0)
    model = make_model("gpt").to(device)
    engine = zerotune.ZeroEngine(
        model,
        make_optimizer("adamw", model.parameters()),
        Knobs(**knobs),
        group=RankGroup(None, 0, 1, device),
        precision=precision,
    )
    losses = []
    for step in range(steps):
        x, y = (t.to(device) for t in batch(step))
        engine.backward(mean_loss(engine(x), y))
        losses.append(engine.step().loss)
    state = engine.full_state_dict()
    assert engine.ledger.live_elements == 0
    return losses, state


def plain(steps: int = 8) -> list[float]:
    device = torch.device("cuda", 0)
    model = make_model("gpt").to(device)
    optimizer = make_optimizer("adamw", model.parameters())
    losses = []
    for step in range(steps):
        x, y = (t.to(device) for t in batch(step))
        loss = mean_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


KNOBS = [{"stage": 0}, {"param_persistence_threshold": 0}, {"release": "keep"}, {"overlap_comm": False}]


def test_fp32_equals_the_plain_loop() -> None:
    expected = plain()
    for knobs in KNOBS:
        losses, _ = train("fp32", knobs)
        assert losses == pytest.approx(expected, abs=1e-4), knobs


def test_knobs_do_not_change_a_bit_in_bf16() -> None:
    first, state = train("bf16", KNOBS[0])
    for knobs in KNOBS[1:]:
        losses, other = train("bf16", knobs)
        assert losses == first, knobs
        assert all(torch.equal(state[name], other[name]) for name in state), knobs


def test_released_parameters_leave_the_device() -> None:
    import zerotune

    device = torch.device("cuda", 0)
    model = make_model("gpt").to(device)
    engine = zerotune.ZeroEngine(
        model,
        make_optimizer("sgd", model.parameters()),
        Knobs(param_persistence_threshold=0),
        group=RankGroup(None, 0, 1, device),
    )
    for step in range(3):
        x, y = (t.to(device) for t in batch(step))
        engine.backward(mean_loss(engine(x), y))
        engine.step()
    engine.flush()
    assert all(p.param.untyped_storage().nbytes() == 0 for p in engine.shards.params)
    assert sum(engine.at_rest().values()) <= torch.cuda.memory_allocated(device)

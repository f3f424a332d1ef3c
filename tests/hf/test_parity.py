"""Models of transformers train as in a plain process, under every stage."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.hf.models import MODELS, SAMPLES, make_batch, make_model
from tests.ranks import run_on_ranks
from zerotune.config.knobs import Knobs
from zerotune.models.recompute import recompute_blocks

pytestmark = pytest.mark.timeout(300)  # importing transformers on every rank takes long on a busy machine

STEPS = 3
LR = 0.1
TOLERANCE = 1e-5

Trained = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and the parameters at the end."""


def settings(stage: int) -> list[dict[str, Any]]:
    """Knobs that differ in what a stage can do."""
    if stage < 3:
        return [{"stage": stage}]
    return [
        {"param_persistence_threshold": 0, "release": "keep", "recompute": "full"},
        {"param_persistence_threshold": 30, "unit_size": 600, "prefetch_distance": 0},
    ]


def train_on_ranks(
    rank: int, size: int, name: str, stages: tuple[int, ...]
) -> list[tuple[Trained, int, int]]:
    """Train under every setting of the stages; also how many units were gathered, and what was live at the end."""
    import zerotune

    share = SAMPLES // size
    outcomes = []
    for stage in stages:
        for setting in settings(stage):
            model = make_model(name)
            recompute_blocks(model, setting.get("recompute", "none"))
            knobs = Knobs.model_validate({k: v for k, v in setting.items() if k != "recompute"})
            engine = zerotune.ZeroEngine(model, torch.optim.SGD(model.parameters(), lr=LR), knobs)
            losses = []
            for step in range(STEPS):
                if step == STEPS - 1:
                    engine.begin_ledger()
                batch = {k: v[rank * share : (rank + 1) * share] for k, v in make_batch(name, step).items()}
                engine.backward(engine(**batch).loss)
                losses.append(engine.step().loss)
            ledger = engine.end_ledger()
            gathers = sum(e.purpose in ("forward", "backward") for e in ledger.collectives)
            state = engine.full_state_dict()
            engine.flush()
            outcomes.append(((losses, state), gathers, engine.ledger.live_elements))
            engine.close()
    return outcomes


@cache
def train_plainly(name: str) -> Trained:
    torch.set_num_threads(1)
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        loss = model(**make_batch(name, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_the_plain_process(name: str, ranks: int) -> None:
    losses, state = train_plainly(name)
    stages = (0, 1, 2, 3)
    outcomes = run_on_ranks(ranks, train_on_ranks, name, stages, limit=240)
    tried = [(stage, setting) for stage in stages for setting in settings(stage)]
    for of_rank in outcomes:
        for (stage, setting), ((found, trained), gathers, live) in zip(tried, of_rank, strict=True):
            assert found == pytest.approx(losses, abs=TOLERANCE), setting
            assert trained.keys() == state.keys()
            for key, value in trained.items():
                assert torch.allclose(value.float(), state[key].float(), atol=TOLERANCE), (
                    f"{key} with {setting}"
                )
            assert (gathers > 0) == (stage == 3), setting
            assert live == 0


def test_the_plain_process_learns() -> None:
    """Otherwise parity would say nothing."""
    for name in MODELS:
        before, (_, after) = make_model(name).state_dict(), train_plainly(name)
        moved = [key for key, value in after.items() if not torch.equal(value, before[key])]
        assert len(moved) > (3 if name == "lora_llama" else 0.6 * len(after)), name

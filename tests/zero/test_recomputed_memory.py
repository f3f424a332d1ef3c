"""What a recomputation made is gone with its block, wherever units are cut."""

from __future__ import annotations

import gc

import pytest
import torch

from zerotune.config.knobs import Knobs
from zerotune.config.schema import GptConfig
from zerotune.engine import RankGroup
from zerotune.models.gpt import Gpt
from zerotune.models.recompute import recompute_blocks
from zerotune.train.memory import allocation_peak
from zerotune.zero.engine import ZeroEngine

LAYERS, WIDTH, LENGTH, BATCH = 6, 32, 64, 8


def peak(unit_size: str | int) -> int:
    """Most bytes that a steady step has allocated at once."""
    torch.manual_seed(0)
    model = Gpt(GptConfig(layers=LAYERS, d_model=WIDTH, heads=2, vocab_size=64, sequence_length=LENGTH))
    recompute_blocks(model, "full")
    engine = ZeroEngine(
        model,
        knobs=Knobs(unit_size=unit_size, param_persistence_threshold=0),
        group=RankGroup(None, 0, 1, torch.device("cpu")),
    )
    tokens = torch.randint(64, (BATCH, LENGTH))

    def step() -> None:
        engine.backward(engine(tokens).square().mean())
        engine.step()

    for _ in range(3):
        step()
    engine.flush()
    gc.collect()
    gc.disable()  # what a cycle holds would be there until it comes by
    try:
        return allocation_peak(step)
    finally:
        gc.enable()
        engine.close()


@pytest.mark.parametrize("unit_size", [4 * WIDTH * WIDTH, WIDTH * WIDTH])
def test_units_within_a_recomputed_block_hold_nothing_of_it(unit_size: int) -> None:
    assert peak(unit_size) < 1.05 * peak("block")

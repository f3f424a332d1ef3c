"""What is random in a step, and on which ranks it is the same."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seed a step.

    Torch's generators, which draw dropout masks, differ between ranks. Python's ``random`` and numpy's are the same on
    all of them: they are the ones to take for what the ranks must decide alike, such as which layers a step drops. All
    are functions of the step, so that a resumed run draws what an unbroken one would have drawn.
    """
    drawn = mixed(seed, step, rank)
    # Not torch.manual_seed(): it takes 3 ms to keep a stack trace for the day that CUDA begins, where it has not.
    torch.default_generator.manual_seed(drawn)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(drawn)
    random.seed(mixed(seed, step))
    np.random.seed(mixed(seed, step) % 2**32)


def mixed(*numbers: int) -> int:
    """A 64-bit seed from a few non-negative numbers; near inputs give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])

"""Random tokens, for measuring speed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from zerotune.models.task import IGNORE, Batch, language_batch


class SyntheticData:
    """Uniform random tokens; the last ``pad_fraction`` of each sample's targets is padding.

    Args:
        vocab_size: Tokens are in ``range(vocab_size)``.
        sequence_length: T, tokens per sample.
        pad_fraction: Share of targets without a loss, rounded to whole tokens.
        seed: Seed of the tokens.
    """

    def __init__(self, vocab_size: int, sequence_length: int, pad_fraction: float, seed: int) -> None:
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.real = sequence_length - round(pad_fraction * sequence_length)
        self.seed = seed

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        windows = torch.from_numpy(np.stack([self._window(step, index) for index in indices]))
        targets_BT = windows[:, 1:].clone()
        targets_BT[:, self.real :] = IGNORE
        return language_batch(windows[:, :-1].contiguous(), targets_BT)

    def _window(self, step: int, index: int) -> np.ndarray:
        # Counter-based: the key is the seed, the counter the place, so no sample depends on another's draws.
        bits = np.random.Philox(key=self.seed, counter=[0, index, step, 0])
        return np.random.Generator(bits).integers(
            self.vocab_size, size=self.sequence_length + 1, dtype=np.int64
        )

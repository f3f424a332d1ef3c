"""The order of samples: every sample once an epoch, another permutation each epoch, the same on every rank."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


class EpochOrder:
    """Which sample of a finite set stands at place i of the global batch of step s.

    Places are numbered through, ``s * global_batch_size + i``, so that the sets of ranks are disjoint and every
    epoch covers every sample.

    Args:
        samples: Number of samples in the set.
        seed: Seed of the permutations.
        global_batch_size: Samples per step.
    """

    def __init__(self, samples: int, seed: int, global_batch_size: int) -> None:
        assert samples > 0 and global_batch_size > 0
        self.samples = samples
        self.seed = seed
        self.global_batch_size = global_batch_size

    def __call__(self, step: int, index: int) -> int:
        """Number of the sample, in ``range(samples)``."""
        epoch, place = divmod(step * self.global_batch_size + index, self.samples)
        return int(_permutation(self.samples, self.seed, epoch)[place])


@lru_cache(maxsize=2)  # a step can straddle two epochs
def _permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(np.arange(samples, dtype=np.uint32 if samples < 2**32 else np.uint64))

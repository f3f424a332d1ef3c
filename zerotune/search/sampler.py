"""The samplers a user can name."""

from __future__ import annotations

import warnings

import optuna

STARTUP_TRIALS = 9
"""Trials before TPE has enough to go by; those that turn one knob each say little of two together."""

# A resumed search must not draw the same numbers again: they would only repeat what is known.
_SEED_STRIDE = 100_003


def make_sampler(name: str, seed: int, trials_so_far: int) -> optuna.samplers.BaseSampler:
    """Make a sampler.

    Args:
        name: ``tpe`` or ``random``.
        seed: The user's seed.
        trials_so_far: Trials that Optuna's study holds already; moves the seed on.
    """
    seed = (seed + _SEED_STRIDE * trials_so_far) % 2**32
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        # `group` lets dimensions that depend on others, and a baseline outside the space, be learned from.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            multivariate=True, group=True, constant_liar=True, n_startup_trials=STARTUP_TRIALS, seed=seed
        )

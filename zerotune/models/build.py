"""From the ``model`` section of model.yaml to an ``nn.Module``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from zerotune.config.errors import UsageError
from zerotune.config.schema import FactoryConfig, ModelConfig
from zerotune.models.factory import call_factory
from zerotune.models.gpt import Gpt
from zerotune.models.hf import build_hf_model, hf_vocab_size
from zerotune.models.llama import Llama


def build_model(model: ModelConfig, seed: int) -> nn.Module:
    """Build the model on the current default device.

    Its weights depend on ``seed`` alone, so every rank gets the same ones; the generators of torch, numpy and
    ``random`` are afterwards as they were.

    Args:
        model: Which model.
        seed: Seed of its initial weights.

    Raises:
        UsageError: The configuration, or the user's own code, does not make a module.
    """
    with seeded(seed):
        if model.gpt is not None:
            return Gpt(model.gpt)
        if model.llama is not None:
            return Llama(model.llama)
        if model.hf is not None:
            return build_hf_model(model.hf)
        assert model.factory is not None, "the schema gives exactly one kind of model"
        return _from_factory(model.factory)


def _from_factory(config: FactoryConfig) -> nn.Module:
    model = call_factory(config)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model factory {config.factory} returned {type(model).__name__}, not a torch.nn.Module",
            "return the module itself",
        )
    return model


def vocab_size(model: ModelConfig) -> int | None:
    """Size of the model's vocabulary; of a factory's, its argument ``vocab_size`` if it has one."""
    if model.hf is not None:
        return hf_vocab_size(model.hf)
    if model.factory is not None:
        return model.factory.args.get("vocab_size")
    decoder = model.gpt or model.llama
    assert decoder is not None, "the schema gives exactly one kind of model"
    return decoder.vocab_size


def sequence_length(model: ModelConfig) -> int | None:
    """Tokens per sample; for a factory, its argument ``sequence_length`` if it has one."""
    if model.factory is not None:
        return model.factory.args.get("sequence_length")
    decoder = model.gpt or model.llama or model.hf
    assert decoder is not None, "the schema gives exactly one kind of model"
    return decoder.sequence_length


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, numpy and ``random`` inside, and put their generators back afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)

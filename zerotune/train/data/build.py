"""From the ``data`` section of model.yaml to batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zerotune.config.errors import UsageError
from zerotune.config.schema import DataConfig, ModelConfig
from zerotune.models import build
from zerotune.models.task import Batch
from zerotune.train.data.factory import factory_data
from zerotune.train.data.synthetic import SyntheticData
from zerotune.train.data.text import TextData, corpus

DEFAULT_SEQUENCE_LENGTH = 128
"""Tokens per sample for a model factory that has no argument ``sequence_length``."""

BYTES = 256
"""Vocabulary of text without a tokenizer, and of synthetic data for a factory without ``vocab_size``."""


class Data(Protocol):
    """Anything that gives batches."""

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        """Samples ``indices`` of the global batch of ``step``, on the CPU, in that order."""


def build_data(data: DataConfig, model: ModelConfig, seed: int, global_batch_size: int) -> Data:
    """Build the data that a model trains on.

    Text, and a factory's dataset, are walked through in epochs: each sample once, in another order each epoch.

    Args:
        data: Which data.
        model: Whose vocabulary and sequence length it takes. A factory's are its arguments ``vocab_size`` and
            ``sequence_length`` where it has them, else 256 and 128.
        seed: Seed of the order of samples, and of synthetic tokens.
        global_batch_size: Samples in one optimizer step over all ranks.

    Raises:
        UsageError: No text was found, a vocabulary is too small, or the user's code raised.
    """
    if data.factory is not None:
        return factory_data(data.factory, model, seed, global_batch_size)
    length = build.sequence_length(model) or DEFAULT_SEQUENCE_LENGTH
    vocab_size = build.vocab_size(model)
    if data.synthetic is not None:
        return SyntheticData(vocab_size or BYTES, length, data.synthetic.pad_fraction, seed)
    assert data.text is not None, "the schema gives exactly one kind of data"
    text = corpus(data.text)
    if vocab_size is not None and text.vocab_size > vocab_size:
        if data.text.tokenizer is None:
            kind = "bytes as tokens need"
        else:
            kind = f"the tokenizer {data.text.tokenizer} needs"
        raise UsageError(
            f"{kind} a vocabulary of {text.vocab_size}, but the model's vocab_size is {vocab_size}",
            f"set the model's vocab_size to {text.vocab_size} or more",
        )
    return TextData(text, length, seed, global_batch_size)

"""The user's own data.

``data.factory`` names a function that is called with its arguments and returns one of

- a map-style torch ``Dataset`` (``len`` and ``[i]``): samples are shuffled every epoch by the seed, each once, and
  put together by torch's ``default_collate``;
- an object with ``batch(step, indices)``, or a function of ``(step, indices)``: gives samples ``indices`` (whole
  numbers below the global batch size) of the global batch of ``step``, and must be a function of these alone.

For a model of your own a batch is whatever its ``forward`` takes (:mod:`zerotune.models.task`). For the language
models (``gpt``, ``llama``, ``hf``) it is tokens (B, T + 1); or a pair of tokens and targets, each (B, T), with the
token that follows ``tokens[:, t]`` in ``targets[:, t]`` and -100 where there is none; or a dict with ``input_ids``
(B, T) and, if there is padding, ``labels`` as transformers defines them: equal to the inputs, with -100 for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from zerotune.config.errors import UsageError
from zerotune.config.schema import FactoryConfig, ModelConfig
from zerotune.models.factory import call_factory, users_code
from zerotune.models.task import Batch, language_batch
from zerotune.train.data.order import EpochOrder


def factory_data(config: FactoryConfig, model: ModelConfig, seed: int, global_batch_size: int) -> FactoryData:
    """Call the user's function and take what it returns.

    Raises:
        UsageError: It raised, or returned none of the three.
    """
    what = f"data factory {config.factory}"
    made = call_factory(config)
    if callable(getattr(made, "batch", None)):
        draw = made.batch
    elif hasattr(made, "__getitem__") and hasattr(made, "__len__"):
        draw = _from_dataset(made, what, seed, global_batch_size)
    elif callable(made):
        draw = made
    else:
        raise UsageError(
            f"{what} returned {type(made).__name__}",
            "return a Dataset with a length, an object with batch(step, indices), or such a function",
        )
    return FactoryData(what, draw, is_language=model.factory is None)


class FactoryData:
    """Wraps what the user's data gives into batches.

    Args:
        what: Begins error messages.
        draw: Gives samples ``indices`` of ``step``.
        is_language: Whether the model is a language model, which needs tokens and targets.
    """

    def __init__(self, what: str, draw: Callable[[int, list[int]], Any], is_language: bool) -> None:
        self.what = what
        self.draw = draw
        self.is_language = is_language

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        with users_code(self.what):
            drawn = self.draw(step, list(indices))
        if not self.is_language:
            return Batch(drawn, None, len(indices), None)
        tokens_BT, targets_BT = self._tokens_and_targets(drawn)
        if len(tokens_BT) != len(indices):
            raise UsageError(f"{self.what} gave {len(tokens_BT)} samples where {len(indices)} were asked for")
        return language_batch(tokens_BT.long(), targets_BT.long())

    def _tokens_and_targets(self, drawn: Any) -> tuple[Tensor, Tensor]:
        if isinstance(drawn, Tensor) and drawn.ndim == 2:
            return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        if isinstance(drawn, Mapping) and isinstance(drawn.get("input_ids"), Tensor):
            tokens_BT, labels_BT = drawn["input_ids"], drawn.get("labels", drawn["input_ids"])
            return tokens_BT[:, :-1].contiguous(), labels_BT[:, 1:].contiguous()
        if isinstance(drawn, (tuple, list)) and [getattr(part, "ndim", None) for part in drawn] == [2, 2]:
            tokens_BT, targets_BT = drawn
            if tokens_BT.shape == targets_BT.shape:
                return tokens_BT, targets_BT
        raise UsageError(
            f"{self.what} does not give what a language model trains on",
            "give tokens (B, T + 1), a pair (tokens, targets), or a dict with input_ids",
        )


def _from_dataset(
    dataset: Any, what: str, seed: int, global_batch_size: int
) -> Callable[[int, list[int]], Any]:
    if len(dataset) == 0:
        raise UsageError(f"{what} returned a dataset without samples")
    order = EpochOrder(len(dataset), seed, global_batch_size)

    def draw(step: int, indices: list[int]) -> Any:
        return default_collate([dataset[order(step, index)] for index in indices])

    return draw

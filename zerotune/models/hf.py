"""Causal language models of transformers, with random weights, from a configuration. Nothing is ever downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerotune.config.errors import UsageError
from zerotune.config.schema import HfConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_hf_model(config: HfConfig) -> nn.Module:
    """Build the model with fp32 weights on the current default device.

    Its attention is torch's ``scaled_dot_product_attention`` where the model has it, and no cache of keys and values
    is kept.

    Raises:
        UsageError: transformers is missing, or the configuration is not one of a causal language model.
    """
    hf_config = load_hf_config(config)
    model_class = _transformers().AutoModelForCausalLM
    try:
        return model_class.from_config(hf_config, dtype=torch.float32, attn_implementation="sdpa")
    except ValueError as error:
        if "attention" not in str(error).lower():
            raise _not_built(hf_config, error) from error
        return model_class.from_config(hf_config, dtype=torch.float32, attn_implementation="eager")
    except (TypeError, KeyError, AttributeError, ImportError) as error:
        raise _not_built(hf_config, error) from error


def load_hf_config(config: HfConfig) -> PretrainedConfig:
    """The transformers configuration that model.yaml names, inline or by a local folder.

    Raises:
        UsageError: transformers is missing, there is no such folder or model type, or the sequence is too long.
    """
    auto_config = _transformers().AutoConfig
    try:
        if config.folder is not None:
            if not (Path(config.folder).expanduser() / "config.json").is_file():
                raise UsageError(
                    f"model.hf.folder: there is no config.json in {config.folder}",
                    "give a local folder, or the configuration inline; nothing is downloaded",
                )
            loaded = auto_config.from_pretrained(Path(config.folder).expanduser(), local_files_only=True)
        else:
            loaded = auto_config.for_model(**(config.config or {}))
    except UsageError:
        raise
    except Exception as error:
        remedy = "model_type must be one that transformers knows, for example llama or gpt2"
        raise UsageError(
            f"model.hf: not a configuration transformers accepts: {_line(error)}", remedy
        ) from error
    loaded.use_cache = False
    limit = getattr(loaded.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.sequence_length > limit:
        raise UsageError(
            f"model.hf.sequence_length {config.sequence_length} is above the model's max_position_embeddings {limit}"
        )
    return loaded


def hf_vocab_size(config: HfConfig) -> int | None:
    """Size of the model's vocabulary, if its configuration says."""
    return getattr(load_hf_config(config).get_text_config(), "vocab_size", None)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "model.hf needs transformers, which is not installed", "pip install zerotune[hf]"
        ) from error
    return transformers


def _not_built(hf_config: PretrainedConfig, error: Exception) -> UsageError:
    return UsageError(f"model.hf: transformers cannot build a causal {hf_config.model_type}: {_line(error)}")


def _line(error: Exception) -> str:
    """The beginning of the error's first line; transformers' messages can list every model it knows."""
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text[:200]}"

"""Tiny models of transformers, each with a batch and its loss; weights from the configuration alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]

VOCABULARY = 61
SAMPLES = 6
LENGTH = 8


def make_model(name: str) -> nn.Module:
    """A model of :data:`MODELS`, the same on every call, without dropout."""
    torch.manual_seed(11)
    return MODELS[name]().eval()


def make_batch(name: str, step: int) -> Batch:
    """The global batch of a step, with every sample's labels equally long."""
    generator = torch.Generator().manual_seed(100 + step)

    def tokens(length: int = LENGTH) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (SAMPLES, length), generator=generator)

    match name:
        case "vit":
            pixels = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
            return {"pixel_values": pixels, "labels": torch.randint(0, 5, (SAMPLES,), generator=generator)}
        case "whisper":
            features = torch.randn(SAMPLES, 8, 20, generator=generator)
            return {"input_features": features, "labels": tokens()}
        case "t5":
            return {"input_ids": tokens(10), "labels": tokens()}
        case "bert":
            ids = tokens()
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": tokens()}
        case _:
            ids = tokens()
            return {"input_ids": ids, "labels": ids}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=20, n_layer=2, n_head=2, use_cache=False,
                   bos_token_id=1, eos_token_id=2)
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **_decoder()))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, tie_word_embeddings=True, **_decoder()))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, **_decoder())
    )


def qwen2_moe() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
            shared_expert_intermediate_size=12, **_decoder(),
        )
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=28,
            max_position_embeddings=16,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=20, d_kv=10, d_ff=28, num_layers=2, num_heads=2, use_cache=False,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=28, image_size=16,
            patch_size=8, num_labels=5,
        )
    )  # fmt: skip


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY, num_mel_bins=8, d_model=20, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=28, decoder_ffn_dim=28,
            max_source_positions=10, max_target_positions=16, use_cache=False, decoder_start_token_id=1,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def lora_llama() -> nn.Module:
    """A frozen Llama with low-rank adapters that are trained."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0
    )
    return get_peft_model(llama(), adapters)  # type: ignore[arg-type]


def _decoder() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 16, "use_cache": False, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen2": qwen2,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
    "lora_llama": lora_llama,
}

import builtins
import json

import pytest
import torch

from zerotune.config.errors import UsageError
from zerotune.config.schema import HfConfig, ModelConfig
from zerotune.models.build import build_model, vocab_size

pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 13,
    "max_position_embeddings": 32,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 13, "n_positions": 32}


def hf(**kwargs) -> ModelConfig:
    return ModelConfig(hf=HfConfig(sequence_length=kwargs.pop("sequence_length", 8), **kwargs))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_inline_configuration(config):
    model = build_model(hf(config=config), seed=0)
    assert model(input_ids=torch.zeros(2, 8, dtype=torch.long)).logits.shape == (2, 8, 13)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "sdpa"
    assert vocab_size(hf(config=config)) == 13


def test_folder_gives_the_same_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    inline = build_model(hf(config=LLAMA), seed=3).state_dict()
    folder = build_model(hf(folder=str(tmp_path)), seed=3).state_dict()
    assert all(torch.equal(inline[name], folder[name]) for name in inline)


def test_meta_device():
    with torch.device("meta"):
        model = build_model(hf(config=LLAMA), seed=0)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"config": {"model_type": "lama"}}, "lama"),
        ({"config": {"hidden_size": 16}}, "model_type"),
        ({"folder": "no/such/folder"}, "no config.json"),
        ({"config": LLAMA, "sequence_length": 64}, "max_position_embeddings 32"),
        ({"config": {"model_type": "vit"}}, "vit"),
    ],
)
def test_mistakes_are_one_line(config, says):
    with pytest.raises(UsageError, match=says) as caught:
        build_model(hf(**config), seed=0)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_missing_transformers_names_the_remedy(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install zerotune\[hf\]"):
        build_model(hf(config=LLAMA), seed=0)

import pytest
import torch

from zerotune.config.schema import LlamaConfig, ModelConfig
from zerotune.models.build import build_model
from zerotune.models.llama import Llama, default_d_ff, rotary_table, rotate

TINY = LlamaConfig(layers=2, d_model=16, heads=4, kv_heads=2, vocab_size=11, sequence_length=8)


@pytest.mark.parametrize("kv_heads", [None, 1, 2, 4])
def test_logits_are_causal(kv_heads):
    model = build_model(ModelConfig(llama=TINY.model_copy(update={"kv_heads": kv_heads})), seed=0)
    x_BT = torch.arange(16).view(2, 8) % 11
    logits_BTV = model(x_BT)
    assert logits_BTV.shape == (2, 8, 11)
    changed = x_BT.clone()
    changed[:, 3] = 10
    assert (model(changed) != logits_BTV).any(dim=2).any(dim=0).tolist() == [False] * 3 + [True] * 5


def test_same_as_transformers_with_the_same_weights():
    transformers = pytest.importorskip("transformers")
    ours = build_model(ModelConfig(llama=TINY), seed=0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=default_d_ff(16),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=11,
        max_position_embeddings=8,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config)
    names = {
        "tok_emb": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "proj": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    state = {}
    for name, tensor in ours.state_dict().items():
        parts = name.split(".")
        where = f"model.layers.{parts[1]}." if parts[0] == "blocks" else ""
        state[f"{where}{names[parts[-2]]}.weight"] = tensor
    theirs.load_state_dict(state)
    x_BT = torch.arange(16).view(2, 8) % 11
    torch.testing.assert_close(ours(x_BT), theirs(input_ids=x_BT).logits, atol=1e-6, rtol=1e-5)


def test_rotation_depends_on_the_distance_alone():
    cos, sin = rotary_table(32, 8, 10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(i: int, j: int) -> torch.Tensor:
        return (rotate(q, cos[i : i + 1], sin[i : i + 1]) * rotate(k, cos[j : j + 1], sin[j : j + 1])).sum()

    torch.testing.assert_close(score(3, 1), score(20, 18))
    torch.testing.assert_close(rotate(q, cos[:1], sin[:1]), q)


def test_tied_and_meta():
    with torch.device("meta"):
        model = Llama(TINY.model_copy(update={"tie_embeddings": True}))
    assert model.head.weight is model.tok_emb.weight
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"meta"}

"""A Llama decoder: rotary positions, RMSNorm, SwiGLU, grouped key and value heads, no biases.

Shape suffixes: B micro-batch, T sequence, D width (d_model), H query heads, G key and value heads, K width of a
head, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerotune.config.schema import LlamaConfig


def default_d_ff(d_model: int) -> int:
    """Width of the MLP where none is given: 8/3 of d_model, rounded up to a multiple of 64."""
    return 64 * math.ceil(8 * d_model / 3 / 64)


def rotary_table(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, fp32, each (length, head_dim / 2)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[k], x[k + K/2]) by the angles of their positions; computed in fp32."""
    first, second = x_BHTK.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BHTK)


class Attention(nn.Module):
    """Causal self-attention; each key and value head serves H / G query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.d_model // config.heads
        self.grouped = (config.kv_heads or config.heads) != config.heads
        kv_width = (config.kv_heads or config.heads) * self.head_dim
        self.query = nn.Linear(config.d_model, config.d_model, bias=False)
        self.key = nn.Linear(config.d_model, kv_width, bias=False)
        self.value = nn.Linear(config.d_model, kv_width, bias=False)
        self.proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_BHTK, k_BGTK, v_BGTK = (
            linear(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        q_BHTK, k_BGTK = rotate(q_BHTK, cos, sin), rotate(k_BGTK, cos, sin)
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=self.grouped
        )
        return self.proj(y_BHTK.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        d_ff = config.d_ff or default_d_ff(config.d_model)
        self.gate = nn.Linear(config.d_model, d_ff, bias=False)
        self.up = nn.Linear(config.d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Attention and MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.mlp = SwiGlu(config)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), cos, sin)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Llama(nn.Module):
    """The decoder; weights are drawn from torch's generator on the current default device."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.tok_emb.weight
        cos, sin = rotary_table(config.sequence_length, config.d_model // config.heads, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Normal with deviation 0.02, smaller where the residual stream is written; norms one."""
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                writes_residual = name.endswith((".proj", ".down"))
                nn.init.normal_(module.weight, std=residual_std if writes_residual else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next token at every position, (B, T, V); T is at most ``sequence_length``."""
        length = tokens_BT.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x_BTD = self.tok_emb(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        return self.head(self.norm(x_BTD))

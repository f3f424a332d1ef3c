"""A GPT decoder: learned positions, LayerNorm before each sublayer, GELU.

Shape suffixes: B micro-batch, T sequence, D width (d_model), H heads, K width of a head, V vocabulary.

No parameter here has a gradient that is zero by mathematics. A bias on keys would: it shifts all scores of a
query alike, and softmax cancels it (an adaptive optimizer then walks along rounding noise). A bias on values adds
what the output projection's bias already adds. So of the three only queries have one; the functions that the
model can represent are the same as GPT-2's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerotune.config.schema import GptConfig


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.key_value = nn.Linear(config.d_model, 2 * config.d_model, bias=False)
        self.proj = nn.Linear(config.d_model, config.d_model, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        k_BTD, v_BTD = self.key_value(x_BTD).chunk(2, dim=-1)
        q_BHTK, k_BHTK, v_BHTK = (
            y_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y_BTD in (self.query(x_BTD), k_BTD, v_BTD)
        )
        dropout = self.dropout if self.training else 0.0
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, dropout_p=dropout)
        return self.proj(y_BHTK.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers, four times as wide inside."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, 4 * config.d_model, bias=config.bias)
        self.down = nn.Linear(4 * config.d_model, config.d_model, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.d_model, bias=config.bias)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.d_model, bias=config.bias)
        self.mlp = Mlp(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attn(self.attn_norm(x_BTD)))
        return x_BTD + self.drop(self.mlp(self.mlp_norm(x_BTD)))


class Gpt(nn.Module):
    """The decoder; weights are drawn from torch's generator on the current default device."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(config.vocab_size, config.d_model)
        self.pos_emb = nn.Embedding(config.sequence_length, config.d_model)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model, bias=config.bias)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.tok_emb.weight
        self._init_weights()

    def _init_weights(self) -> None:
        """GPT-2's: normal with deviation 0.02, smaller where the residual stream is written; biases zero."""
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                writes_residual = name.endswith((".proj", ".down"))
                nn.init.normal_(module.weight, std=residual_std if writes_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next token at every position, (B, T, V); T is at most ``sequence_length``."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.drop(self.tok_emb(tokens_BT) + self.pos_emb(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))

"""Recomputed blocks: the same numbers, fewer activations, and hooks of the block outside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from zerotune.config.errors import UsageError
from zerotune.config.schema import GptConfig, LlamaConfig
from zerotune.models.gpt import Gpt
from zerotune.models.llama import Llama
from zerotune.models.recompute import recompute_blocks
from zerotune.models.units import repeated_blocks

TOKENS = torch.arange(24).view(2, 12) % 7


def gpt(layers: int = 4, dropout: float = 0.3) -> Gpt:
    torch.manual_seed(0)
    return Gpt(
        GptConfig(layers=layers, d_model=16, heads=2, vocab_size=7, sequence_length=12, dropout=dropout)
    )


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model(TOKENS).square().mean().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["full", "every_2", "every_3"])
def test_gradients_and_dropout_masks_are_the_same(mode: str, reentrant: bool) -> None:
    plain = gradients(gpt())
    model = gpt()
    chosen = recompute_blocks(model, mode, reentrant)
    assert len(chosen) == {"full": 4, "every_2": 2, "every_3": 2}[mode]
    assert chosen == [*model.blocks][:: 1 if mode == "full" else int(mode[-1])]
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), plain, strict=True))


class Stack(nn.Module):
    """Blocks called with keywords; they count their runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keyword() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(shift=1.0, x=x)
        return x


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, *, x: torch.Tensor, shift: float) -> torch.Tensor:
        self.runs += 1
        return self.linear(x).tanh() + shift


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_keywords_and_inputs_without_gradients(reentrant: bool, needs_grad: bool) -> None:
    torch.manual_seed(0)
    model = Stack()
    plain = copy.deepcopy(model)
    recompute_blocks(model, "full", reentrant)
    x = torch.randn(2, 4, requires_grad=needs_grad)
    for each in (model, plain):
        each(x).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    assert [layer.runs for layer in model.layers] == [2, 2, 2]


def test_nothing_is_recomputed_without_gradients() -> None:
    model = Stack()
    recompute_blocks(model, "full")
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert [layer.runs for layer in model.layers] == [1, 1, 1]


def test_hooks_of_a_block_run_once() -> None:
    model = gpt()
    calls: list[str] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: calls.append("in"))
        block.register_forward_hook(lambda module, args, output: calls.append("out"))
    recompute_blocks(model, "full")
    gradients(model)
    assert calls == ["in", "out"] * 4


def test_a_copy_calls_its_own_blocks() -> None:
    model = gpt(dropout=0.0)
    recompute_blocks(model, "full")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert other(TOKENS).abs().max() == 0 < model(TOKENS).abs().max()


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"activation_checkpointing full: the model has no blocks that repeat"
    ):
        recompute_blocks(nn.Linear(2, 2), "full")
    assert recompute_blocks(nn.Linear(2, 2), "none") == []


def test_blocks_are_those_that_are_units() -> None:
    llama = Llama(LlamaConfig(layers=3, d_model=16, heads=2, vocab_size=7, sequence_length=12))
    assert repeated_blocks(llama) == [*llama.blocks]

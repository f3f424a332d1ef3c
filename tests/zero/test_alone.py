"""A rank that is alone: nothing is copied, and a step takes what a plain loop takes."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import zerotune
from tests.ranks import run_on_ranks
from zerotune.config.knobs import Knobs
from zerotune.config.schema import GptConfig
from zerotune.engine import RankGroup
from zerotune.models.gpt import Gpt
from zerotune.train.memory import allocation_peak

STEPS = 4


class SharedGradient(nn.Module):
    """Two parameters, in units of their own, to which autograd hands views of one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        self.first.weight = nn.Parameter(torch.randn(4, 8))
        self.second.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.first.weight.reshape(-1) + self.second.weight.reshape(-1)) * x).square().sum()


class TwoInOne(nn.Module):
    """Two parameters of one module whose gradients are views of one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.left + self.right.view(-1)) * x[:16]).square().sum()


def parameters_after(module: nn.Module, stage: int, clip: float | None) -> tuple[list[Tensor], list[Tensor]]:
    """Of a plain loop and of the engine, after the same steps."""
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    engine = zerotune.ZeroEngine(
        module,
        torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9),
        Knobs(stage=stage),  # type: ignore[arg-type]
        RankGroup(None, 0, 1, torch.device("cpu")),
        clip_norm=clip,
    )
    inputs = torch.randn(STEPS, 32, generator=torch.Generator().manual_seed(1))
    for x in inputs:
        plain(x).backward()
        if clip is not None:
            # torch's own clip would scale a gradient twice that two parameters share
            whole = torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None]).norm()
            for p in plain.parameters():
                assert p.grad is not None
                p.grad = p.grad * min(1.0, clip / (float(whole) + 1e-6))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        engine.backward(engine(x))
        engine.step()
    state = engine.full_state_dict()
    return [p.detach() for p in plain.parameters()], [state[name] for name, _ in plain.named_parameters()]


def train_alone(rank: int, size: int, kind: type[nn.Module], stage: int, clip: float | None) -> None:
    for mine, theirs in zip(*parameters_after(kind(), stage, clip), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", [SharedGradient, TwoInOne])
def test_gradients_that_share_memory_are_scaled_once(
    kind: type[nn.Module], stage: int, clip: float | None
) -> None:
    run_on_ranks(1, train_alone, kind, stage, clip)


def peaks(rank: int, size: int, stage: int, release: str) -> tuple[int, int]:
    """Bytes that a step of a plain loop, and of the engine, has allocated at most beyond what is at rest."""
    config = GptConfig(layers=2, d_model=64, heads=4, vocab_size=512, sequence_length=32)
    tokens = torch.randint(512, (2, 32))
    module = Gpt(config)
    plain = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    engine = zerotune.ZeroEngine(
        module,
        torch.optim.AdamW(module.parameters(), fused=True),
        Knobs(stage=stage, release=release),  # type: ignore[arg-type]
        RankGroup(None, 0, 1, torch.device("cpu")),
    )

    def plain_step() -> None:
        plain(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def our_step() -> None:
        engine.backward(engine(tokens).square().mean())
        engine.step()

    found = []
    for step in (plain_step, our_step):
        for _ in range(3):
            step()
        found.append(min(allocation_peak(step) for _ in range(2)))
    return found[0], found[1]


@pytest.mark.parametrize("release", ["after_use", "keep"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_takes_no_more_than_a_plain_loop(stage: int, release: str) -> None:
    ((plain, ours),) = run_on_ranks(1, peaks, stage, release)
    assert ours <= 1.02 * plain


def what_is_left(rank: int, size: int, stage: int) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    engine = zerotune.ZeroEngine(module, knobs=Knobs(stage=stage))  # type: ignore[arg-type]
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 64)).square().mean())
        engine.step()
    masters = [weakref.ref(param.master) for param in engine.shards.params]
    flats = [weakref.ref(unit.flat) for unit in engine.shards.units]
    engine.close()
    gc.collect()
    assert not any(ref() is not None for ref in masters), "a closed engine holds masters"
    assert not any(ref() is not None for ref in flats), "a closed engine holds shards"


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closed_engine_holds_nothing(ranks: int, stage: int) -> None:
    run_on_ranks(ranks, what_is_left, stage)


class Counter(nn.Module):
    """Keeps something beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count = 3

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def load_what_is_beside_tensors(rank: int, size: int) -> None:
    module = nn.Sequential(Counter())
    engine = zerotune.ZeroEngine(module)
    state = engine.full_state_dict()
    module[0].count = 7
    engine.load_state_dict(state)
    assert module[0].count == 3


def test_extra_state_is_loaded() -> None:
    run_on_ranks(2, load_what_is_beside_tensors)

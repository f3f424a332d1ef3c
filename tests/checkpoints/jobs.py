"""Models and loops that the ranks run in the tests of checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from zerotune.config.knobs import Knobs

BATCH = 12


class Odd(nn.Module):
    """Sizes 7, 13 and 1, which no number of ranks divides: 4 ranks are more than some parameters' elements."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(13, 1)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate * self.second(self.drop(torch.tanh(self.first(x))))


class Mixed(nn.Module):
    """A tied head, a frozen norm, running statistics, a buffer that is not saved, a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7).requires_grad_(False)
        self.wide = nn.Linear(7, 13)
        self.batch_norm = nn.BatchNorm1d(13)
        self.narrow = nn.Linear(13, 7)
        self.unused = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.full((7,), 0.25), persistent=False)
        self.register_buffer("counts", torch.arange(3))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(self.norm(self.embed(x)) + self.shift)
        return self.head(self.narrow(torch.relu(self.batch_norm(hidden))) * self.scale)


@dataclass(frozen=True)
class Setting:
    """How it is trained.

    Attributes:
        knobs: As ``Knobs`` takes them.
        accumulation: Micro-batches per step.
        dropout: Of the model.
        precision: ``fp32`` or ``bf16``.
        engine: More arguments of the engine.
    """

    knobs: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    dropout: float = 0.0
    precision: str = "fp32"
    engine: dict[str, Any] = field(default_factory=dict)


def plain_model(dropout: float = 0.0) -> Odd:
    torch.manual_seed(5)
    return Odd(dropout)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 7, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def micro_batch(
    rank: int, size: int, accumulation: int, step: int, micro: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(step)
    share = BATCH // (size * accumulation)
    start = (micro * size + rank) * share
    return x[start : start + share], y[start : start + share]


class Trainer:
    """An engine in a loop of a user's own, with a schedule and with random numbers that no step seeds."""

    def __init__(self, rank: int, size: int, setting: Setting) -> None:
        import zerotune

        self.rank, self.size, self.setting = rank, size, setting
        model = plain_model(setting.dropout)
        self.engine = zerotune.ZeroEngine(
            model,
            adam(model.parameters()),
            Knobs(**setting.knobs),
            precision=setting.precision,
            **setting.engine,
        )
        self.schedule = warm_up(self.engine.optimizer)
        torch.manual_seed(70 + rank)
        random.seed(7)
        np.random.seed(8)
        self.micro = 0
        self.trace: list[tuple[float, ...]] = []

    def micro_step(self) -> None:
        step = self.engine.steps
        x, y = micro_batch(self.rank, self.size, self.setting.accumulation, step, self.micro)
        noise = 0.01 * (random.random() + np.random.rand())
        out = self.engine(x + noise)
        self.engine.backward((out.float() - y).square().mean(), float(len(x)))
        self.micro += 1
        if self.micro == self.setting.accumulation:
            lr = self.engine.optimizer.param_groups[0]["lr"]
            result = self.engine.step()
            self.schedule.step()
            self.micro = 0
            norm = -1.0 if result.skipped else result.grad_norm  # NaN is not equal to itself
            self.trace.append((result.loss, norm, lr, result.loss_scale))

    def train(self, micro_steps: int) -> list[tuple[float, ...]]:
        for _ in range(micro_steps):
            self.micro_step()
        return self.trace

    def save(self, folder: str, **options: Any) -> None:
        extra = {"micro": self.micro, "schedule": self.schedule.state_dict()}
        self.engine.save(folder, extra=extra, **options)

    def load(self, folder: str, **options: Any) -> None:
        extra = self.engine.load(folder, **options)
        self.schedule.load_state_dict(extra["schedule"])
        self.micro = 0 if options.get("restart_window") else extra["micro"]
        self.trace.clear()

    def state(self) -> dict[str, torch.Tensor]:
        return self.engine.full_state_dict()

    def counters(self) -> list[float]:
        return [float(state["step"]) for state in self.engine.optimizer.state.values()]


def disturb() -> None:
    """What another process would be: other random states."""
    torch.manual_seed(999)
    random.seed(999)
    np.random.seed(999)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def plain_losses(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain process on the global batch, without dropout and noise, at a constant rate."""
    torch.set_num_threads(1)
    model = plain_model()
    optimizer = adam(model.parameters())
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain_steps(engine: Any, rank: int, size: int, steps: int) -> Iterator[float]:
    """The same steps with an engine."""
    for _ in range(steps):
        x, y = micro_batch(rank, size, 1, engine.steps, 0)
        engine.backward((engine(x) - y).square().mean(), float(len(x)))
        yield engine.step().loss


def build(knobs: dict[str, Any] | None = None) -> Any:
    """An engine around :class:`Odd`."""
    import zerotune

    model = plain_model()
    return zerotune.ZeroEngine(model, adam(model.parameters()), Knobs(**(knobs or {})))


def build_mixed(knobs: dict[str, Any] | None = None) -> Any:
    """An engine around :class:`Mixed` that has taken two steps, on samples that differ between ranks."""
    import zerotune

    torch.manual_seed(5)
    model = Mixed()
    engine = zerotune.ZeroEngine(
        model, adam(p for p in model.parameters() if p.requires_grad), Knobs(**(knobs or {}))
    )
    torch.manual_seed(20 + engine.group.rank)
    for _ in range(2):
        x = torch.randint(0, 11, (6,))
        engine.backward(nn.functional.cross_entropy(engine(x), x))
        engine.step()
    return engine

"""Weights used by somebody else than their own module (E02), tied ones (E05), and orders that do not hold (E07, E09)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.harness import (
    ONE,
    THREE,
    TWO,
    USUAL,
    VOCABULARY,
    WIDTH,
    Block,
    Setting,
    Stack,
    World,
    Zero,
    assert_parity,
    cross_entropy,
    square_error,
    tokens,
    train,
    vectors,
)


class _Decoder(nn.Module):
    """Logits from the embedding's weight, by reading it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.stack(self.emb(x)), self.emb.weight)


def weight_read_by_the_root(world: World) -> None:
    model = world.build(_Decoder(), lr=0.5)
    train(world, model, steps=4, data=tokens, loss=cross_entropy)
    assert model.module.emb.weight.shape == (VOCABULARY, WIDTH)


def weight_read_by_the_loss(world: World) -> None:
    """A fused loss takes the head's weight as an argument; from the third step it reads another one, too."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(VOCABULARY, WIDTH)
            self.stack = Stack()
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stack(self.emb(x))

    model = world.build(Hidden(), lr=0.5)
    for step in range(4):
        x, y = tokens(step)
        head = model.module.head
        loss = cross_entropy(F.linear(model(world.share(x)), head.weight, head.bias), world.share(y))
        if step >= 2:
            loss = loss + 0.01 * model.module.stack.blocks[1].up.weight.pow(2).sum()
        model.backward(loss)
        model.step()


def weight_read_now_and_then(world: World) -> None:
    """A path that reads another module's weight only after the order has been recorded, without any event of its own."""

    class Sometimes(_Decoder):
        tied = False

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.stack(self.emb(x))
            if self.tied:
                h = h * self.stack.blocks[1].norm.weight + self.stack.blocks[0].down.bias
            return F.linear(h, self.emb.weight)

    model = world.build(Sometimes(), lr=0.2)
    for step in range(6):
        Sometimes.tied = step in (3, 5)
        train(world, model, steps=1, first=step, data=tokens, loss=cross_entropy)


class _Tied(nn.Module):
    """One weight under three names, one module under two, and a pair that shares a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.first = Block()
        self.second = self.first
        self.third = Block()
        self.third.up.bias = self.first.up.bias
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.aux = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.emb.weight
        self.aux.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.third(self.second(self.first(self.emb(x))))
        return self.head(h) + 0.5 * self.aux(h)


def tied_weights(world: World) -> None:
    model = world.build(_Tied(), lr=0.3)
    train(world, model, steps=4, data=tokens, loss=cross_entropy)
    module = model.module
    assert module.head.weight is module.emb.weight is module.aux.weight
    if isinstance(model, Zero):
        masters = [p for group in model.optimizer.param_groups for p in group["params"]]
        assert len(masters) == len(set(masters)) == len(list(module.parameters()))
        state = model.state()
        assert torch.equal(state["head.weight"], state["emb.weight"])


class _Dropping(nn.Module):
    """Blocks in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


def evaluation_between_steps(world: World) -> None:
    """Before the first step, by another path, under both ways of saying so, and inside a step as its own teacher."""
    model = world.build(_Dropping(), lr=0.5)
    x, y = vectors(90)

    def evaluate(order: list[int]) -> None:
        model.module.eval()
        model.module.order = order
        with torch.no_grad():
            for _ in range(3):
                world.note(square_error(model(x), y))
        with torch.inference_mode():
            world.note(square_error(model(x), y))
        model.module.train()
        model.module.order = [0, 1, 2, 3]
        if isinstance(model, Zero):
            model.assert_nothing_is_live("after evaluation")

    evaluate([0, 1, 2, 3])
    train(world, model, steps=2)
    evaluate([0, 1, 2, 3])
    evaluate([0, 3])
    train(world, model, steps=2, first=2)
    for step in (4, 5):
        a, b = vectors(step)
        out = model(world.share(a))
        with torch.no_grad():
            target = model(world.share(b))
        model.backward(square_error(out, target))
        model.step()
    evaluate([3, 1])
    grad_mode = model(x)  # an evaluation that forgot no_grad
    world.note(square_error(grad_mode.detach(), y))
    train(world, model, steps=2, first=6)


def orders_that_change(world: World) -> None:
    """A-B and B-A in turns, dropped layers, and repeated ones; then the order is stable again."""
    model = world.build(_Dropping())
    drop = torch.Generator().manual_seed(5)
    orders = [[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 2, 3], [1, 0, 2, 3]]
    orders += [[i for i in range(4) if torch.rand((), generator=drop) > 0.4] or [0] for _ in range(3)]
    orders += [[0, 0, 1], [0, 0, 0, 1]] + 3 * [[0, 1, 2, 3]]
    for step, order in enumerate(orders):
        model.module.order = order
        train(world, model, steps=1, first=step)
    if isinstance(model, Zero):
        model.engine.begin_ledger()
        train(world, model, steps=1, first=50)
        schedule = model.engine.schedules[0]
        ledger = model.engine.end_ledger()
        gathered = sum(e.elements for e in ledger.collectives if e.purpose in ("forward", "backward"))
        assert gathered in [s.gathered_elements(model.engine.layout) for s in model.engine.schedules]
        assert (schedule.peak_live > 0) is (world.size > 1)
        model.engine.begin_ledger()
        train(world, model, steps=1, first=51)
    else:
        train(world, model, steps=2, first=50)


@pytest.mark.parametrize(
    "scenario",
    [weight_read_by_the_root, weight_read_by_the_loss, weight_read_now_and_then, tied_weights],
    ids=lambda s: s.__name__,
)
def test_weights_of_others(scenario: Any) -> None:
    assert_parity(scenario, [*USUAL, Setting(2, {"param_persistence_threshold": 0, "unit_size": 100})])


@pytest.mark.parametrize("scenario", [evaluation_between_steps, orders_that_change], ids=lambda s: s.__name__)
def test_orders(scenario: Any) -> None:
    assert_parity(scenario, [ONE, TWO, THREE, Setting(2)])

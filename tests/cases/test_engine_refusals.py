"""What appears, moves or is called behind the engine's back: parity, or a refusal that names it (E14, E15)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases.harness import (
    USUAL,
    WIDTH,
    Block,
    Stack,
    World,
    Zero,
    assert_parity,
    assert_refused,
    square_error,
    train,
    vectors,
)
from tests.ranks import run_on_ranks

# --------------------------------------------------------------------------------------- wrappers that delegate


class _Wrapper(nn.Module):
    """Forwards every unknown attribute to what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 0.5


class _Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Wrapper(_Wrapper(Block())) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + block.norm.weight
        return x


def delegating_wrappers(world: World) -> None:
    """With forwards, with and without gradients, before the first optimizer step."""
    model = world.build(_Wrapper(_Wrapped()))
    x, y = vectors(60)
    with torch.no_grad():
        world.note(square_error(model(x), y))
    world.note(square_error(model(x), y).detach())
    train(world, model)


def test_wrappers_and_early_forwards() -> None:
    assert_parity(delegating_wrappers, USUAL)


# ------------------------------------------------------------------------------------------ refused by name


def _built(world: World) -> Any:
    model = world.build(Stack())
    train(world, model, steps=2)
    return model


def attached(world: World) -> None:
    model = _built(world)
    model.module.blocks[1].extra = nn.Linear(WIDTH, WIDTH)
    train(world, model, steps=1)


def replaced(world: World) -> None:
    model = _built(world)
    model.module.head.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    train(world, model, steps=1)


def cast(world: World) -> None:
    _built(world).module.to(torch.float64)


def copied(world: World) -> None:
    copy.deepcopy(_built(world).module)


def pickled(world: World) -> None:
    pickle.dumps(_built(world).module)


def saved_by_the_module(world: World) -> None:
    _built(world).module.state_dict()


def read_between_steps(world: World) -> None:
    sum(p.norm() for p in _built(world).module.parameters())


def read_through_data(world: World) -> None:
    float(_built(world).module.head.weight.data.sum())


def written_between_steps(world: World) -> None:
    model = _built(world)
    with torch.no_grad():
        model.module.head.weight.mul_(2)


def written_within_gathered(world: World) -> None:
    model = _built(world)
    with model.gathered(), torch.no_grad():
        model.module.head.weight.mul_(2)
    train(world, model, steps=1)


class _Clamps(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


def written_in_forward(world: World) -> None:
    train(world, world.build(_Clamps()), steps=2)


def stepped_alone(world: World) -> None:
    _built(world).optimizer.step()


def backward_outside(world: World) -> None:
    model = _built(world)
    x, y = vectors(1)
    square_error(model(world.share(x)), world.share(y)).backward()


def part_called(world: World) -> None:
    model = _built(world)
    model.module.blocks[0](torch.zeros(1, WIDTH))


def expanded(world: World) -> None:
    module = Stack()
    module.wide = nn.Parameter(torch.zeros(1).expand(5))
    world.build(module)


def tied_by_memory(world: World) -> None:
    module = Stack()
    module.blocks[1].up.weight = nn.Parameter(module.blocks[0].up.weight.data)
    world.build(module)


def tied_by_transposing(world: World) -> None:
    module = Stack()
    module.blocks[1].down.weight = nn.Parameter(module.blocks[0].up.weight.data.t())
    world.build(module)


def buffer_over_parameter(world: World) -> None:
    module = Stack()
    module.register_buffer("row", module.head.weight.data[0])
    world.build(module)


def renormalised(world: World) -> None:
    world.build(nn.Sequential(nn.Embedding(9, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH)))


def lazy(world: World) -> None:
    world.build(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(3)), optimizer=lambda m: torch.optim.SGD)  # type: ignore[arg-type,return-value]


def nothing_to_train(world: World) -> None:
    world.build(Stack().requires_grad_(False))


def everything_frozen_later(world: World) -> None:
    model = _built(world)
    model.module.requires_grad_(False)
    train(world, model, steps=1)


def wide(world: World) -> None:
    module = Stack()
    module.head.double()
    world.build(module)


def thawed_within_a_window(world: World) -> None:
    module = Stack()
    module.head.requires_grad_(False)
    model = world.build(module)
    x, y = vectors(0)
    model.backward(square_error(model(world.share(x)), world.share(y)))
    module.head.requires_grad_(True)
    model.backward(square_error(model(world.share(x)), world.share(y)))


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (attached, ("blocks.1.extra.weight", "not managed")),
        (replaced, ("head.weight", "not managed")),
        (cast, ("blocks.0.norm.weight", "gathered()")),
        (copied, ("is partitioned",)),
        (pickled, ("is partitioned",)),
        (saved_by_the_module, ("is partitioned", "engine.state_dict()")),
        (read_between_steps, ("blocks.0.norm.weight is partitioned", "gathered()")),
        (read_through_data, ("head.weight is partitioned",)),
        (written_between_steps, ("head.weight is partitioned", "load_state_dict")),
        (written_within_gathered, ("head.weight was changed in place",)),
        (written_in_forward, ("head.weight was changed in place",)),
        (stepped_alone, ("engine.step()",)),
        (backward_outside, ("engine.backward(loss)",)),
        (part_called, ("blocks.0", "call the engine")),
        (expanded, ("wide", "expanded")),
        (tied_by_memory, ("blocks.0.up.weight and blocks.1.up.weight", "same memory")),
        (tied_by_transposing, ("blocks.0.up.weight and blocks.1.down.weight",)),
        (buffer_over_parameter, ("head.weight and row",)),
        (renormalised, ("0.weight", "max_norm")),
        (wide, ("head.weight is of float64", ".float()")),
        (lazy, ("1.weight has no shape yet",)),
        (nothing_to_train, ("nothing to train",)),
        (everything_frozen_later, ("nothing to train",)),
        (thawed_within_a_window, ("requires_grad changed within",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_is_refused_by_name(scenario: Any, words: tuple[str, ...]) -> None:
    assert_refused(scenario, *words)


def read_where_it_may(world: World) -> None:
    """Shapes, types and printing always; values within gathered()."""
    model = world.build(Stack())
    train(world, model, steps=2)
    weight = model.module.head.weight
    assert weight.shape == (WIDTH, WIDTH) and weight.numel() == WIDTH * WIDTH and weight.is_leaf
    assert weight.dtype is torch.float32 and isinstance(weight, nn.Parameter)
    assert torch.zeros_like(weight).sum() == 0
    assert sum(p.numel() for p in model.module.parameters()) > 0
    if isinstance(model, Zero):
        assert ("partitioned" in repr(weight)) is (world.size > 1)
        assert weight.grad is None
    with model.gathered():
        assert "partitioned" not in repr(weight)
        world.note(weight.detach().sum())
        world.note(sum(float(p.detach().pow(2).sum()) for p in model.module.parameters()))
        one = copy.deepcopy(model.module.head)
        world.note(one.weight.detach().sum())
    train(world, model, steps=1, first=2)


def test_what_may_be_read() -> None:
    assert_parity(read_where_it_may, USUAL)


# ----------------------------------------------------------------------- E14: ranks that start or draw differently


def unseeded(rank: int, size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """A model built from another seed on every rank; dropout draws that are a rank's own."""
    import zerotune

    torch.manual_seed(100 + rank)
    module = nn.Sequential(Stack(), nn.Dropout(0.5))
    module.register_buffer("noise", torch.randn(4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    engine = zerotune.ZeroEngine(module, knobs=zerotune.Knobs(param_persistence_threshold=0))
    after = engine.state_dict()
    mask = engine(torch.ones(2, WIDTH)).flatten() == 0
    engine.close()
    return before, after, mask.tolist()


def test_every_rank_starts_from_the_first_ones_values() -> None:
    one, two = (run_on_ranks(3, unseeded) for _ in range(2))
    for _, after, _ in one:
        for name, value in one[0][0].items():
            assert torch.equal(after[name], value), name
    masks = [mask for _, _, mask in one]
    assert masks[0] != masks[1] != masks[2]
    assert masks == [mask for _, _, mask in two]

"""Norms and clipping (E04), accumulation windows (E06), frozen and thawed parameters (E01, E10), groups (E17)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cases.harness import (
    TWO,
    WIDTH,
    Setting,
    Stack,
    World,
    Zero,
    assert_parity,
    square_error,
    train,
    vectors,
)

HUGE = {"param_persistence_threshold": 10**9}

# --------------------------------------------------------------------------------------------------- E04: norms


class _Uneven(nn.Module):
    """Gradients of very different size, and a bias that persists at the default threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(WIDTH, 17)
        self.large = nn.Linear(17, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 100 * self.large(0.01 * self.small(x))


def clipped_norms(world: World) -> None:
    model = world.build(_Uneven(), lr=1e-3, clip=world.options["clip"])
    train(world, model, steps=4)


@pytest.mark.parametrize("clip", [20.0, float("inf"), None])
def test_the_norm_is_the_plain_one_on_every_rank(clip: float | None) -> None:
    knobs = [{"param_persistence_threshold": 0}, {"param_persistence_threshold": 20}, HUGE, {"stage": 1}]
    settings = [
        Setting(ranks, k, options={"clip": clip}) for ranks, k in zip((3, 2, 3, 3), knobs, strict=True)
    ]
    assert_parity(clipped_norms, settings, tolerance=1e-5)


# ------------------------------------------------------------------------------------------- E06: accumulation


def windows(world: World) -> None:
    """Ten micro-batches of the stated size with four to a window: the last window has two."""
    model = world.build(Stack(), clip=1.0)
    sizes = world.options["micro"]
    count = 0
    for number in range(10):
        x, y = vectors(number)
        for piece in range(12 // sizes):
            rows = slice(piece * sizes, (piece + 1) * sizes)
            model.backward(square_error(model(world.share(x[rows])), world.share(y[rows])))
        count += 1
        if count == 4 or number == 9:
            model.step()
            count = 0


def test_every_split_of_a_window_gives_the_same_weights() -> None:
    settings = [
        Setting(2, {"param_persistence_threshold": 0}, options={"micro": 12}),
        Setting(2, {"param_persistence_threshold": 0, "release": "keep"}, options={"micro": 4}),
        Setting(2, HUGE, options={"micro": 4}),
        Setting(2, {"param_persistence_threshold": 0}, "local", options={"micro": 6}),
        Setting(3, {"stage": 2}, options={"micro": 6}),
        Setting(2, {"stage": 1}, options={"micro": 4}),
        Setting(3, {"stage": 0}, "local", options={"micro": 3}),
    ]
    assert_parity(windows, settings)


def test_the_split_does_not_matter_to_plain_pytorch_either() -> None:
    from tests.cases.harness import compare, run_plain

    one = run_plain(windows, {"micro": 12})
    for micro in (4, 3):
        compare(run_plain(windows, {"micro": micro}), one, 1e-5)


def a_dropped_window(world: World) -> None:
    """zero_grad() in the middle of a window drops what it has, as in plain PyTorch."""
    model = world.build(Stack())
    for step in range(4):
        for micro in range(3):
            x, y = vectors(10 * step + micro)
            model.backward(square_error(model(world.share(x)), world.share(y)))
            if micro == 0 and step % 2:
                (model.optimizer if step == 1 else model.module).zero_grad()
                if not isinstance(model, Zero):
                    model._loss = model._weight = 0.0
        model.step()


def test_zero_grad_drops_the_window() -> None:
    assert_parity(a_dropped_window)


# ------------------------------------------------------------------------- E01: frozen weights and recomputation


class _Adapted(nn.Module):
    """A frozen block with a trainable adapter of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.base = nn.Linear(12, 12)
        self.down = nn.Linear(12, 2, bias=False)
        self.up = nn.Linear(2, 12, bias=False)
        for param in (*self.norm.parameters(), *self.base.parameters()):
            param.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return torch.tanh(self.base(h) + self.up(self.down(h))) + x


class _Checkpointed(nn.Module):
    def __init__(self, block: type[nn.Module], mode: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "segment":
            h = checkpoint(lambda h: self.blocks[1](self.blocks[0](h)), x, use_reentrant=False)
            return self.blocks[2](h)
        for block in self.blocks:
            x = (
                block(x)
                if self.mode == "none"
                else checkpoint(block, x, use_reentrant=self.mode == "reentrant")
            )
        return x


def frozen_and_checkpointed(world: World) -> None:
    mode = "none" if world.is_plain else world.options["mode"]
    model = world.build(_Checkpointed(_Adapted, mode))
    for step in range(3):
        x, y = vectors(step)
        mine = world.share(x)
        if mode == "reentrant":
            mine.requires_grad_()  # reentrant checkpointing needs an input with a gradient
        model.backward(square_error(model(mine), world.share(y)))
        model.step()


@pytest.mark.parametrize("mode", ["none", "reentrant", "non-reentrant", "segment"])
def test_frozen_weights_and_recomputation(mode: str) -> None:
    options = {"mode": mode}
    settings = [
        Setting(2, options=options),
        Setting(3, TWO.knobs, options=options),
        Setting(1, options=options),
        Setting(
            2, {"param_persistence_threshold": 0, "unit_size": 30, "prefetch_distance": 500}, options=options
        ),
    ]
    assert_parity(frozen_and_checkpointed, settings)


# ------------------------------------------------------------------------------------------ E10: who trains changes


def thawing(world: World) -> None:
    """Nine tenths are frozen; after an evaluation a layer is thawed, later another frozen, at last only a bias trains."""
    module = Stack(4)
    for block in module.blocks:
        block.requires_grad_(False)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = world.build(module, optimizer=_only_trainable if world.options.get("only") else None)
    train(world, model, steps=2)
    _assert_unmoved(model, start, "blocks.")
    x, y = vectors(70)
    with torch.no_grad():
        world.note(square_error(model(x), y))
    module.blocks[2].requires_grad_(True)
    train(world, model, steps=2, first=2)
    module.head.requires_grad_(False)
    train(world, model, steps=2, first=4)
    module.requires_grad_(False)
    module.blocks[0].up.bias.requires_grad_(True)
    train(world, model, steps=2, first=6)
    _assert_unmoved(model, start, "blocks.1", "blocks.3")
    if isinstance(model, Zero):
        from zerotune.records import ByteClass

        assert model.engine.at_rest()[ByteClass.GRADIENT] <= 4 * 32  # one bias of 24 elements, padded


def _only_trainable(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def _assert_unmoved(model: Any, start: dict[str, torch.Tensor], *names: str) -> None:
    state = model.state()
    for name, value in start.items():
        if name.startswith(names):
            assert torch.equal(state[name], value), f"{name} is frozen and moved"


def test_thawing_during_the_run() -> None:
    assert_parity(thawing)


# ------------------------------------------------------------------------------------------- E17: parameter groups


def groups(world: World) -> None:
    kind = world.options["kind"]

    def make(module: nn.Module) -> torch.optim.Optimizer:
        first, second, head = module.blocks[0], module.blocks[1], module.head
        matrices = [p for p in module.parameters() if p.dim() > 1]
        vectors_ = [p for p in module.parameters() if p.dim() <= 1]
        if kind == "rates":
            return torch.optim.SGD(
                [
                    {"params": first.parameters(), "lr": 0.1},
                    {"params": second.parameters(), "lr": 0.01},
                    {"params": head.parameters(), "lr": 0.0},
                ],
                lr=1.0,
            )
        if kind == "decay":
            return torch.optim.AdamW(
                [{"params": matrices, "weight_decay": 0.1}, {"params": vectors_, "weight_decay": 0.0}],
                lr=0.01,
            )
        if kind == "one":
            return torch.optim.Adam(module.parameters(), lr=0.01)
        return torch.optim.Adam(
            [{"params": p} for p in (first.parameters(), second.parameters(), head.parameters())], lr=0.01
        )

    torch.manual_seed(0)
    model = world.build(Stack(2), optimizer=make)
    scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 2, gamma=0.5)
    for step in range(4):
        train(world, model, steps=1, first=step)
        scheduler.step()


@pytest.mark.parametrize("kind", ["rates", "decay", "one", "three"])
def test_groups_keep_their_settings(kind: str) -> None:
    # On three ranks a slice of 12 biases is padding on the last, so that its part of a group is empty.
    assert_parity(
        groups, [Setting(3, options={"kind": kind}), Setting(2, {"stage": 2}, options={"kind": kind})]
    )


def test_one_group_is_three_equal_groups() -> None:
    from tests.cases.harness import compare, run_engine
    from tests.ranks import run_on_ranks

    one, three = (
        run_on_ranks(2, run_engine, groups, Setting(2, options={"kind": kind}))[0]
        for kind in ("one", "three")
    )
    compare(three, one, 1e-7)


# ---------------------------------------------------------------------------------------- E11: persistent parameters


def persistence(world: World) -> None:
    model = world.build(Stack(), optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01))
    x, y = vectors(80)
    for step in range(3):
        train(world, model, steps=1, first=step)
        model.module.eval()
        with torch.no_grad():
            world.note(square_error(model(x), y))
        model.module.train()
    saved = model.state()
    train(world, model, steps=1, first=3)
    if isinstance(model, Zero):
        model.engine.load_state_dict(saved)
    else:
        model.module.load_state_dict(saved)
    with torch.no_grad():
        world.note(square_error(model(x), y))
    train(world, model, steps=2, first=4)
    if isinstance(model, Zero) and world.options.get("is_huge"):
        model.engine.begin_ledger()
        train(world, model, steps=1, first=6)
        kinds = [e.purpose for e in model.engine.end_ledger().collectives if e.kind.value == "all_gather"]
        assert kinds == ["refresh"]
        model.engine.begin_ledger()
    else:
        train(world, model, steps=1, first=6)


def test_every_threshold_gives_the_same_numbers() -> None:
    settings = [
        Setting(
            ranks,
            {"param_persistence_threshold": threshold},
            options={"is_huge": threshold == 10**9 and ranks > 1},
        )
        for ranks, threshold in ((2, 0), (3, 10), (2, 100), (3, 10**9), (2, 10**9), (1, 10**9))
    ]
    assert_parity(persistence, settings)

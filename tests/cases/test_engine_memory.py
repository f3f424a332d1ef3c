"""Released is gone (E08), gathers are bounded (E12), and bytes of model states are exact (E16)."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.harness import Setting, World, Zero, assert_parity, square_error
from tests.cases.test_engine_modules import _Product
from tests.ranks import run_on_ranks
from zerotune.schedule import padded_numel

WIDE = 64


class _Layer(nn.Module):
    """A linear layer that uses its weight in a way that may hold on to it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE) / WIDE**0.5)
        self.way = way
        self.cache: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "function":
            return torch.tanh(_Product.apply(x, self.weight))
        if self.way == "cast":
            return torch.tanh(F.linear(x.bfloat16(), self.weight.to(torch.bfloat16)).float())
        if self.way == "cache":
            self.cache = self.weight.to(torch.float64)
            return torch.tanh(F.linear(x.double(), self.cache).float())
        return torch.tanh(F.linear(x, self.weight))


class _Layers(nn.Module):
    def __init__(self, way: str, count: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(way) for _ in range(count))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.way == "autocast"):
            for layer in self.layers:
                x = layer(x)
        return x


def released(world: World) -> None:
    """How many layers' storages are really allocated whenever one of them runs, forward and backward."""
    way, ahead = world.options["way"], world.options["ahead"]
    model = world.build(_Layers(way), lr=0.01)
    params = list(model.module.parameters())
    held: list[int] = []

    def look(*_: Any) -> None:
        held.append(sum(p.untyped_storage().nbytes() > 0 for p in params))

    copies: list[weakref.ref[torch.Tensor]] = []
    for layer in model.module.layers:
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
        layer.register_forward_hook(
            lambda m, args, out: copies.append(weakref.ref(m.cache)) if m.cache is not None else None
        )
    for step in range(4):
        held.clear()
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(12, WIDE, generator=generator), torch.randn(12, WIDE, generator=generator)
        model.backward(square_error(model(world.share(x)), world.share(y)))
        model.step()
        if isinstance(model, Zero):
            # One layer runs; in backward the entry of the next may come before the exit of the last.
            assert max(held) <= 2, f"{max(held)} of 8 layers were full at once"
            assert model.engine.ledger.peak_live_elements <= (2 + 2 * ahead + 2) * padded_numel(
                WIDE * WIDE, world.size
            )
    if way == "cache":
        assert sum(r() is not None for r in copies) <= 8, "copies of earlier steps are still alive"


@pytest.mark.parametrize("way", ["plain", "function", "cast", "cache", "autocast"])
def test_released_storages_are_gone(way: str) -> None:
    settings = [
        Setting(
            2,
            {"param_persistence_threshold": 0, "prefetch_distance": ahead * WIDE * WIDE},
            options={"way": way, "ahead": ahead},
        )
        for ahead in (0, 1)
    ]
    tolerance = 2e-5 if way in ("plain", "function", "cache") else 5e-3
    assert_parity(released, settings, tolerance=tolerance)


def bounded(world: World) -> None:
    """Twelve equal layers that compute slowly: gathers run ahead no further than they may."""
    model = world.build(_Layers("plain", 12), lr=0.01)
    for layer in model.module.layers:
        layer.register_forward_hook(lambda *_: time.sleep(0.002))
    unit = padded_numel(WIDE * WIDE, world.size)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(12, WIDE, generator=generator), torch.randn(12, WIDE, generator=generator)
        model.backward(square_error(model(world.share(x)), world.share(y)))
        model.step()
    if isinstance(model, Zero):
        limit = world.options["limit"] * WIDE * WIDE
        ahead = (
            0 if limit == 0 else max(unit, min(limit, 12 * unit))
        )  # a unit larger than the limit still works
        # A gather's buffer and the storage it is copied to exist side by side.
        assert model.engine.ledger.peak_live_elements <= 2 * (unit + ahead) + unit
        for schedule in model.engine.schedules:
            assert schedule.peak_ahead <= ahead
            assert schedule.peak_live <= 2 * (unit + ahead) + unit


@pytest.mark.parametrize("limit", [0, 0.5, 1, 3, 100])
def test_gathers_in_flight_are_bounded(limit: float) -> None:
    knobs = {"param_persistence_threshold": 0, "prefetch_distance": int(limit * WIDE * WIDE)}
    assert_parity(bounded, [Setting(2, knobs, options={"limit": limit})])


# ---------------------------------------------------------------------------------------------- E16: model states


class _Thousand(nn.Module):
    """Parameters of 1000 elements, one of them tied and one frozen on request."""

    def __init__(self, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.one = nn.Linear(25, 40, bias=False)
        self.two = nn.Linear(25, 40, bias=False)
        self.back = nn.Linear(40, 25, bias=False)
        if tied:
            self.two.weight = self.one.weight
        self.two.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.tanh(self.one(x) + self.two(x)))


def states(rank: int, size: int, case: dict[str, Any]) -> dict[str, int]:
    import zerotune

    module = _Thousand(case["tied"], case["frozen"])
    make: Any = torch.optim.SGD if case["optimizer"] == "sgd" else torch.optim.Adam
    engine = zerotune.ZeroEngine(
        module,
        make(module.parameters(), lr=0.01),
        zerotune.Knobs(stage=case["stage"], param_persistence_threshold=case["threshold"]),
        precision=case["precision"],
    )
    dtype = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    for step in range(2):
        engine.backward(engine(torch.randn(2, 25, dtype=dtype)).float().pow(2).mean())
        if step == 0:
            engine.step()
    engine.flush()  # between backward and step, when there are gradients
    answer = {byte_class.value: count for byte_class, count in engine.at_rest().items()}
    engine.step()
    engine.close()
    return answer


def expected_bytes(case: dict[str, Any], ranks: int) -> dict[str, int]:
    """Worked out by hand: slices of 1000 elements are padded to multiples of 16."""
    padded = {1: 1008, 3: 1008}[ranks]
    mine = padded if case["stage"] == 0 else padded // ranks
    params = 2 if case["tied"] else 3
    trained = params - (case["frozen"] and not case["tied"])
    width = 2 if case["precision"] == "bf16" else 4
    persists = case["stage"] < 3 or case["threshold"] >= 1000 or ranks == 1
    masters = params * mine * 4 if case["precision"] == "bf16" else 0
    moments = trained * (2 * 4 * mine + 4) if case["optimizer"] == "adam" else 0
    return {
        "full": params * padded * width if persists else 0,
        "shard": 0 if persists else params * mine * width,
        "gradient": trained * mine * 4,
        "optimizer": masters + moments,
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_bytes_of_model_states_are_exact(ranks: int) -> None:
    plain = {
        "stage": 3,
        "threshold": 0,
        "precision": "fp32",
        "optimizer": "adam",
        "tied": False,
        "frozen": False,
    }
    changes: list[dict[str, Any]] = [
        {},
        {"precision": "bf16"},
        {"optimizer": "sgd"},
        {"tied": True},
        {"frozen": True},
        {"frozen": True, "precision": "bf16"},
        {"threshold": 1000},
        {"threshold": 1000, "precision": "bf16"},
        {"stage": 2},
        {"stage": 0},
    ]
    for change in changes:
        case = plain | change
        for answer in run_on_ranks(ranks, states, case):
            found = {name: answer.get(name, 0) for name in ("full", "shard", "gradient", "optimizer")}
            assert found == expected_bytes(case, ranks), change

"""E03 and E11: ranks that take different branches."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_on_ranks
from zerotune.config.errors import UsageError
from zerotune.config.knobs import Knobs
from zerotune.engine import RankGroup
from zerotune.engine.guard import RanksDiverged
from zerotune.models.units import cut_into_units

WIDTH, EXPERTS, STEPS = 24, 4, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class MixtureOfExperts(nn.Module):
    """Runs the experts that it is told to, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return x + sum(weights[:, i : i + 1] * self.experts[i](x) for i in chosen)


class Model(nn.Module):
    """Two mixtures between an entry and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, WIDTH)
        self.first = MixtureOfExperts()
        self.second = MixtureOfExperts()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return self.head(self.second(self.first(self.entry(x), chosen), chosen))


class ModelOfExperts(nn.Module):
    """Experts that hang at the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, WIDTH)
        self.experts = nn.ModuleDict({f"e{i}": Expert() for i in range(EXPERTS)})
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        h = self.entry(x)
        for i in chosen:
            h = h + self.experts[f"e{i}"](h)
        return self.head(h)


class EarlyExit(nn.Module):
    """No mixture by name: how deep a rank goes depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, WIDTH)
        self.deep = nn.ModuleDict({f"level{i}": Expert() for i in range(EXPERTS)})
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        h = self.entry(x)
        for i in range(1 + max(chosen) % 2):
            h = h + self.deep[f"level{i}"](h)
        return self.head(h)


MODELS = {cls.__name__: cls for cls in (Model, ModelOfExperts, EarlyExit)}


def make(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[name]()


def chosen_by(rank: int, step: int) -> list[int]:
    """Rank 0 takes experts 0 and 1, rank 1 takes 2 and 3; swapped every other step."""
    first = 2 * ((rank + step // 2) % 2)
    return [first, first + 1] if rank < 2 else [1, 2]


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


def train(rank: int, size: int, name: str, knobs: dict[str, Any], leaf_modules: Any) -> Any:
    import zerotune

    model = make(name)
    engine = zerotune.ZeroEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Knobs(**knobs), leaf_modules=leaf_modules
    )
    engine.begin_ledger()
    for step in range(STEPS):
        x, y = batch_of(rank, step)
        engine.backward(nn.functional.mse_loss(engine(x, chosen_by(rank, step)), y))
        engine.step()
    log = [(e.kind, e.purpose, e.units, e.elements) for e in engine.end_ledger().collectives]
    state = engine.full_state_dict()
    engine.close()
    return state, log


def oracle(name: str, ranks: int) -> dict[str, torch.Tensor]:
    """One plain process; a parameter that only some ranks used gets the average with zeros."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(ranks):
            x, y = batch_of(rank, step)
            (nn.functional.mse_loss(model(x, chosen_by(rank, step)), y) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("name", "leaves"), [("Model", "auto"), ("ModelOfExperts", "auto"), ("EarlyExit", ["deep"])]
)
@pytest.mark.parametrize(
    "knobs", [{"prefetch_distance": 10**6, "param_persistence_threshold": 0}, {"unit_size": 400}]
)
def test_e03_ranks_that_choose_differently_train_as_one(
    ranks: int, name: str, leaves: Any, knobs: dict[str, Any]
) -> None:
    expected = oracle(name, ranks)
    answers = run_on_ranks(ranks, train, name, knobs, leaves, limit=120)
    for state, log in answers:
        assert log == answers[0][1]
        for key, value in expected.items():
            assert torch.allclose(state[key], value, atol=1e-6), key


@pytest.mark.parametrize("threshold", [0, 10, 1000, 10**6])
def test_e11_persistence_with_branches(threshold: int) -> None:
    expected = oracle("Model", 2)
    for state, _ in run_on_ranks(
        2, train, "Model", {"param_persistence_threshold": threshold}, "auto", limit=120
    ):
        for key, value in expected.items():
            assert torch.allclose(state[key], value, atol=1e-6), key


def diverge(rank: int, size: int, name: str, knobs: dict[str, Any]) -> tuple[str, float]:
    import zerotune

    group = RankGroup(dist.new_group(list(range(size))), rank, size, torch.device("cpu"))
    model = make(name)
    engine = zerotune.ZeroEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Knobs(**knobs), group=group, leaf_modules=[]
    )
    began = time.monotonic()
    with pytest.raises(RanksDiverged) as caught:
        for step in range(STEPS):
            x, y = batch_of(rank, step)
            engine.backward(nn.functional.mse_loss(engine(x, chosen_by(rank, step)), y))
            engine.step()
    engine.close()
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("prefetch", [0, 10**6])
def test_e03_without_leaf_modules_every_rank_names_what_differs(ranks: int, prefetch: int) -> None:
    knobs = {"param_persistence_threshold": 0, "prefetch_distance": prefetch}
    for message, seconds in run_on_ranks(ranks, diverge, "Model", knobs, limit=120):
        # With three ranks, two that differ may be found before the third has come so far.
        assert len(set(re.findall(r"gathers first\.experts\.\d", message))) >= 2
        assert all(f"rank {rank} " in message for rank in range(ranks))
        assert "train.leaf_modules" in message
        assert seconds < 10


def test_e03_an_early_exit_that_nobody_declared_is_named() -> None:
    for message, seconds in run_on_ranks(2, diverge_by_depth, limit=120):
        assert "deep.level1" in message and "head" in message
        assert seconds < 10


def diverge_by_depth(rank: int, size: int) -> tuple[str, float]:
    import zerotune

    group = RankGroup(dist.new_group(list(range(size))), rank, size, torch.device("cpu"))
    model = make("EarlyExit")
    engine = zerotune.ZeroEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Knobs(param_persistence_threshold=0), group=group
    )
    began = time.monotonic()
    with pytest.raises(RanksDiverged) as caught:
        for step in range(STEPS):
            x, y = batch_of(rank, step)
            # Both ranks go the whole way once, so that an order is recorded.
            engine.backward(nn.functional.mse_loss(engine(x, [1 if step < 2 else rank]), y))
            engine.step()
    engine.close()
    return str(caught.value), time.monotonic() - began


def names(module: nn.Module, leaf_modules: Any = "auto", unit_size: Any = "block") -> list[str]:
    return [unit.label for unit in cut_into_units(module, unit_size, leaf_modules)]


def test_a_mixture_of_experts_is_one_unit() -> None:
    assert names(Model()) == ["entry", "first", "second", "head"]
    assert names(Model(), unit_size=100) == ["entry", "first", "second", "head"]
    assert names(ModelOfExperts()) == ["(root)", "entry", "head"]
    assert "first.experts.3" in names(Model(), [])


def test_a_mixture_inside_a_block_stays_in_the_block() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(MixtureOfExperts(), nn.LayerNorm(WIDTH)) for _ in range(2)
            )

    assert names(Stack()) == ["layers.0", "layers.1"]
    assert "layers.0.0" in names(Stack(), unit_size=2000)


def test_leaf_modules_go_by_name_or_by_class() -> None:
    assert names(Model(), ["first"])[:2] == ["entry", "first"]
    assert names(Model(), ["MixtureOfExperts"]) == names(Model())
    with pytest.raises(UsageError, match="no module or class of modules named third"):
        names(Model(), ["third"])


def test_a_model_named_after_mixtures_is_not_one() -> None:
    class SparseMoeModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    whole = nn.Module()
    whole.body = SparseMoeModel()
    assert names(whole) == ["body.layers.0", "body.layers.1", "body.layers.2"]

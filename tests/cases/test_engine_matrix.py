"""Every knob crossed with every other: a pairwise covering array here, a three-way one with ``make matrix``."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.cases.covering import combinations, combinations_of, covering_array
from tests.cases.harness import (
    LIMIT_S,
    VOCABULARY,
    WIDTH,
    Block,
    Record,
    Setting,
    World,
    assert_parity,
    compare,
    cross_entropy,
    run_engine,
    tokens,
)
from tests.ranks import run_on_ranks

COLUMNS: dict[str, list[Any]] = {
    "stage": [3, 0, 1, 2],
    "prefetch": [0, "auto", 10**9],
    "persistence": [0, 10**9],
    "release": ["after_use", "keep", "planned"],
    "recompute": ["none", "reentrant", "non-reentrant"],
    "accumulation": [1, 3],
    "accumulate": ["reduce", "local"],
    "precision": ["fp32", "bf16"],
    "ranks": [1, 2, 3],
    "optimizer": ["sgd", "adam"],
    "model": ["gpt", "branches"],
}
STEPS = 3
TOLERANCE_BF16 = 1e-4
"""Where a master differs in its last bit, the working copy may differ in one of bf16's."""


class _Gpt(nn.Module):
    """Embedding, blocks, and a head tied to the embedding."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = _run(block, h, self.recompute)
        return self.head(self.norm(h))


class _Branches(nn.Module):
    """Odd shapes, two branches that join, a scalar, a weight read by the root, and a frozen part."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH, bias=False))
        self.mix = nn.Parameter(torch.tensor(0.3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb(x)
        right = _run(self.right, h, self.recompute)
        for block in self.left:
            h = _run(block, h, self.recompute)
        h = torch.tanh(self.frozen(h + self.mix * right))
        return self.head(h) + F.linear(h, self.emb.weight)


def _run(module: nn.Module, h: torch.Tensor, recompute: str) -> torch.Tensor:
    if recompute == "none":
        return module(h)
    return checkpoint(module, h, use_reentrant=recompute == "reentrant")


MODELS: dict[str, Callable[[str], nn.Module]] = {"gpt": _Gpt, "branches": _Branches}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.2),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.003, eps=1e-4),
}
CLIP = 2.0


def combination(world: World) -> None:
    row = world.options
    module = MODELS[row["model"]]("none" if world.is_plain else row["recompute"])
    model = world.build(module, optimizer=OPTIMIZERS[row["optimizer"]], clip=CLIP)
    for step in range(STEPS):
        for micro in range(row["accumulation"]):
            x, y = tokens(10 * step + micro)
            model.backward(cross_entropy(model(world.share(x)), world.share(y)))
        model.step()


def cast_alike(row: dict[str, Any]) -> Record:
    """The oracle of a bf16 row: one process that casts where the engine does, each rank's share by itself.

    Forward and backward in bf16, from fp32 masters; what travels between ranks is bf16, every sum is fp32.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    masters = MODELS[row["model"]]("none")
    optimizer = OPTIMIZERS[row["optimizer"]](masters)
    record = Record()
    ranks, rounds = row["ranks"], row["accumulation"]
    sums_first = row["accumulate"] == "local" or row["stage"] == 1
    for step in range(STEPS):
        working = copy.deepcopy(masters).bfloat16()
        if sums_first:
            for param in working.parameters():
                param.grad_dtype = torch.float32  # several uses of one weight are summed in it, too
        total, losses = {}, []
        for rank in range(ranks):
            own: dict[str, torch.Tensor] = {}
            for micro in range(rounds):
                x, y = (part.chunk(ranks)[rank] for part in tokens(10 * step + micro))
                loss = cross_entropy(working(x), y)
                loss.backward()
                losses.append(loss.item())
                for name, param in working.named_parameters():
                    if param.grad is not None:
                        own[name] = own.get(name, 0) + param.grad.float()
                        param.grad = None
            for name, grad in own.items():
                sent = grad.bfloat16().float() if sums_first else grad
                total[name] = total.get(name, 0) + sent
        for name, param in masters.named_parameters():
            param.grad = total[name] / (ranks * rounds) if name in total else None
        record.norms.append(float(nn.utils.clip_grad_norm_(masters.parameters(), CLIP)))
        record.losses.append(sum(losses) / len(losses))
        optimizer.step()
    record.states = [{name: value.detach() for name, value in masters.state_dict().items()}]
    return record


def run_row(row: dict[str, Any]) -> None:
    """Hold one row against the plain run, or, under bf16, against one that casts alike."""
    knobs = {
        "stage": row["stage"],
        "prefetch_distance": row["prefetch"],
        "param_persistence_threshold": row["persistence"],
        "release": row["release"],
        "memory_budget": 2**40 if row["release"] == "planned" else None,
    }
    setting = Setting(row["ranks"], knobs, row["accumulate"], row["precision"], options=row)
    if row["precision"] == "fp32":
        assert_parity(combination, [setting])
        return
    expected = cast_alike(row)
    for outcome in run_on_ranks(row["ranks"], run_engine, combination, setting, limit=LIMIT_S):
        compare(outcome, expected, TOLERANCE_BF16)


PAIRS = covering_array(COLUMNS, 2)


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_every_pair_of_knobs(number: int) -> None:
    run_row(PAIRS[number])


@pytest.mark.matrix
@pytest.mark.timeout(5400)
def test_every_three_knobs() -> None:
    rows = covering_array(COLUMNS, 3)
    failures = []
    for row in rows:
        try:
            run_row(row)
        except Exception as error:
            failures.append(f"{row}\n{error}")
    print(f"\n{len(rows)} rows cover every three knobs' values; {len(failures)} failed", file=sys.stderr)
    assert not failures, "\n\n".join(failures)


def test_the_array_is_small_and_the_same_every_time() -> None:
    assert len(PAIRS) <= 25
    assert covering_array(COLUMNS, 2) == PAIRS


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=3, max_size=6), st.integers(2, 3))
def test_every_combination_is_covered(sizes: list[int], strength: int) -> None:
    columns = {f"c{index}": list(range(size)) for index, size in enumerate(sizes)}
    rows = covering_array(columns, strength, tries=3)
    covered = {c for row in rows for c in combinations_of(row, strength)}
    assert covered == set(combinations(columns, strength))
    assert all(row.keys() == columns.keys() for row in rows)

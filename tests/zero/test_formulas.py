"""Bytes, elements moved, full gradients alive, gathers per unit: what the formulas say is what there is."""

from __future__ import annotations

import weakref
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_on_ranks
from tests.zero.jobs import make_model, mean_loss, micro_batches
from zerotune.config.knobs import Knobs
from zerotune.engine import RankGroup
from zerotune.records import ByteClass, CollectiveKind
from zerotune.zero.precision import Precision

STAGES = (0, 1, 2, 3)
LIMIT_S = 180.0
STATES = (ByteClass.SHARD, ByteClass.FULL, ByteClass.GRADIENT, ByteClass.OPTIMIZER)


def make_engine(
    model: nn.Module, knobs: dict[str, Any], group: RankGroup | None = None, **settings: Any
) -> Any:
    import zerotune

    every = {"param_persistence_threshold": 0} | knobs
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    return zerotune.ZeroEngine(model, optimizer, Knobs(**every), group, **settings)


# ---------------------------------------------------------------------------------------------------------- bytes


def bytes_before_step(engine: Any, batches: list[Any]) -> int:
    """Bytes of model states between the second backward and its step, without the optimizer's step counters.

    The optimizer's state exists from the first step on.
    """
    for number in range(2):
        for x, y in batches:
            engine.backward(mean_loss(engine(x), y))
        if number == 0:
            engine.step()
    engine.flush()  # reductions in flight, pools
    found = engine.at_rest()
    assert found[ByteClass.POOLED] == 0
    return sum(found[c] for c in STATES) - 4 * len(engine.shards.params)


def bytes_of(rank: int, size: int, settings: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    answers = []
    for setting in settings:
        model = make_model("gpt")
        numel = sum(p.numel() for p in model.parameters())
        engine = make_engine(
            model,
            {"stage": setting["stage"]},
            precision=setting["precision"],
            gradient_dtype=setting["gradient"],
        )
        found = bytes_before_step(engine, list(micro_batches(rank, size, 1, 0)))
        answers.append((found, engine.layout.total_padded, numel))
        engine.close()
    return answers


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_per_parameter(ranks: int) -> None:
    settings = [
        {"stage": stage, "precision": precision, "gradient": gradient}
        for stage in STAGES
        for precision, gradient in (("bf16", "compute"), ("bf16", "fp32"), ("fp32", "fp32"))
    ]
    for answers in run_on_ranks(ranks, bytes_of, settings, limit=LIMIT_S):
        for (found, padded, numel), setting in zip(answers, settings, strict=True):
            dtypes = Precision.of(setting["precision"], setting["gradient"])
            per_parameter = dtypes.bytes_per_parameter(setting["stage"], ranks)
            # Full gradients that wait for the step are not padded.
            unpadded = (padded - numel) * dtypes.gradient.itemsize if setting["stage"] == 1 else 0
            assert found == per_parameter * padded - unpadded, setting


def test_the_formula_is_the_well_known_one() -> None:
    low = Precision.of("bf16", "compute")
    for n in (1, 2, 3, 4, 8):
        known = [16, 4 + Fraction(12, n), 2 + Fraction(14, n), Fraction(16, n)]
        assert [low.bytes_per_parameter(stage, n) for stage in STAGES] == known
        wide = [18, 6 + Fraction(12, n), 2 + Fraction(16, n), Fraction(18, n)]
        assert [Precision.of("fp16").bytes_per_parameter(stage, n) for stage in STAGES] == wide
        full = [16, 8 + Fraction(8, n), 4 + Fraction(12, n), Fraction(16, n)]
        assert [Precision.of("fp32").bytes_per_parameter(stage, n) for stage in STAGES] == full
    assert Precision.of("bf16", "compute").bytes_per_parameter(3, 1, moments=1) == 12


class Even(nn.Module):
    """Sizes that 8 ranks divide into slices of 16, so that there is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def eight_ranks_in_one(rank: int, size: int) -> list[float]:
    """The first of eight ranks, the others being pretended."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        group = RankGroup.default("cpu")
        answers = []
        for stage in STAGES:
            model = Even()
            numel = sum(p.numel() for p in model.parameters())
            engine = make_engine(model, {"stage": stage}, group, precision="bf16", gradient_dtype="compute")
            for number in range(2):
                engine.backward(engine(torch.ones(2, 128)).float().square().mean())
                if number == 0:
                    engine.step()
            engine.flush()
            found = engine.at_rest()
            total = sum(found[c] for c in STATES) - 4 * len(engine.shards.params)
            answers.append(total / numel)
            engine.close()
        return answers
    finally:
        dist.destroy_process_group()


def test_bytes_per_parameter_on_eight_ranks() -> None:
    assert run_on_ranks(1, eight_ranks_in_one) == [[16.0, 5.5, 3.75, 2.0]]


# ------------------------------------------------------------------------------------------------- elements moved


def moved(rank: int, size: int) -> list[tuple[int, int, int, set[str]]]:
    answers = []
    for stage in STAGES:
        engine = make_engine(make_model("gpt"), {"stage": stage})
        for step in range(3):
            if step == 2:
                engine.begin_ledger()
            for x, y in micro_batches(rank, size, 1, step):
                engine.backward(mean_loss(engine(x), y))
            engine.step()
        ledger = engine.end_ledger()
        entries = [e for e in ledger.collectives if e.purpose != "numbers"]
        assert {e.kind for e in entries} <= {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER}
        sent = sum(e.sent_bytes for e in entries) // 4
        savings = (
            sum(saving.elements for schedule in engine.schedules for saving in schedule.savings)
            if stage == 3
            else 0
        )
        assert size > 1 or not any(schedule.gathers() for schedule in engine.schedules)
        answers.append((sent, savings, engine.layout.total_padded, {e.purpose for e in entries}))
        engine.close()
    return answers


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_elements_moved_and_saved_are_2p_2p_2p_3p(ranks: int) -> None:
    purposes = [
        {"gradient"},
        {"gradient", "refresh"},
        {"gradient", "refresh"},
        {"gradient", "forward", "backward"},
    ]
    for answers in run_on_ranks(ranks, moved, limit=LIMIT_S):
        for stage, (sent, saved, padded, seen) in enumerate(answers):
            share = Fraction(ranks - 1, ranks)
            assert sent + saved * share == (3 if stage == 3 else 2) * padded * share, stage
            assert seen == (purposes[stage] if ranks > 1 else set())


# ------------------------------------------------------------------------------------------ full gradients alive


def gradients_alive(rank: int, size: int, settings: list[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """At every gradient that autograd delivers in a steady step: elements of full gradients that are really allocated,
    at their parameters, collected, and in buckets, and of those the ones whose unit is still in use."""
    answers = []
    for setting in settings:
        model = make_model("gpt")
        engine = make_engine(model, setting)
        unit_of = {p.param: p.ref.unit for p in engine.shards.params}
        grads: list[tuple[weakref.ref[torch.Tensor], int]] = []
        seen: list[tuple[int, int]] = []

        def delivered(
            param: nn.Parameter,
            engine: Any = engine,
            grads: Any = grads,
            unit_of: Any = unit_of,
            seen: Any = seen,
        ) -> None:
            assert param.grad is not None
            grads.append((weakref.ref(param.grad), unit_of[param]))
            alive = [(g().numel(), unit) for g, unit in grads if g() is not None]
            open_units = engine._executor._open_everywhere()
            waiting = sum(numel for numel, unit in alive if open_units.get(unit))
            filling = [
                gradient
                for f in engine._reducer._filling.values()
                for gradient in (*f.stay.values(), *([] if f.rows is None else [f.rows]))
            ]
            flying = [gradient for f in engine._reducer._in_flight for gradient in f.sent]
            taken = sum(gradient.numel() for gradient in (*filling, *flying))
            seen.append((sum(numel for numel, _ in alive) + taken, waiting))

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(delivered)
        for step in range(3):
            seen.clear()
            for x, y in micro_batches(rank, size, 1, step):
                engine.backward(mean_loss(engine(x), y))
            assert all(g() is None for g, _ in grads), "a full gradient outlives backward"
            assert not engine._reducer._filling
            engine.step()
        answers.append(list(seen))
        engine.close()
    return answers


@pytest.mark.parametrize("ranks", [2, 3])
def test_full_gradients_alive_are_two_buckets_the_largest_parameter_and_what_waits(ranks: int) -> None:
    largest = max(p.numel() for p in make_model("gpt").parameters())
    padding = 16 * ranks * len(list(make_model("gpt").parameters()))
    settings = [
        {"stage": stage, "reduce_bucket_size": size}
        for stage in (2, 3)
        for size in (0, 300, 1500, 6000, 10**6)
    ]
    for answers in run_on_ranks(ranks, gradients_alive, settings, limit=LIMIT_S):
        for seen, setting in zip(answers, settings, strict=True):
            assert seen
            for alive, waiting in seen:
                bucket = max(setting["reduce_bucket_size"], largest)
                assert alive - waiting <= 2 * bucket + largest + padding, setting


# ------------------------------------------------------------------------------------------------ gathers per unit


class Recomputed(nn.Module):
    """Calls another module under activation checkpointing; plainly with ``use_reentrant=None``."""

    def __init__(self, inner: nn.Module, use_reentrant: bool | None) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def gathers_per_unit(
    rank: int, size: int, every: list[tuple[int, bool]], release: str
) -> list[dict[str, int]]:
    answers = []
    for k, use_reentrant in every:
        model = make_model("gpt")
        model.blocks = nn.ModuleList(
            Recomputed(block, use_reentrant if k and i % k == 0 else None)
            for i, block in enumerate(model.blocks)
        )
        engine = make_engine(model, {"release": release, "allgather_bucket_size": 0})
        for step in range(3):
            if step == 2:
                engine.begin_ledger()
            for x, y in micro_batches(rank, size, 1, step):
                engine.backward(mean_loss(engine(x), y))
            engine.step()
        ledger = engine.end_ledger()
        counts: dict[str, int] = {}
        for entry in ledger.collectives:
            if entry.purpose in ("forward", "backward"):
                for unit in entry.units:
                    counts[unit] = counts.get(unit, 0) + 1
        answers.append(counts)
        engine.close()
    return answers


@pytest.mark.parametrize("release", ["after_use", "keep"])
def test_recomputation_shares_the_gather_of_backward(release: str) -> None:
    """none, full and every second block, reentrant and not: the same table of gathers per unit."""
    every = [(0, False), (1, False), (2, False), (1, True), (2, True)]
    for answers in run_on_ranks(2, gathers_per_unit, every, release, limit=LIMIT_S):
        table = answers[0]
        blocks = {name: count for name, count in table.items() if name.startswith("blocks.")}
        assert blocks == {f"blocks.{i}": 2 if release == "after_use" else 1 for i in range(3)}
        for kind, counts in zip(every, answers, strict=True):
            assert counts == table, kind

"""What is stored, what is moved, and when it is freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.zero.jobs import BATCH, VOCABULARY, make_model, make_optimizer, mean_loss, micro_batches
from zerotune.config.knobs import Knobs
from zerotune.records import ByteClass, CollectiveKind
from zerotune.schedule import padded_numel, slice_bounds, slice_numel


def _engine(model: str, knobs: dict[str, Any], optimizer: str = "sgd", precision: str = "fp32") -> Any:
    import zerotune

    module = make_model(model)
    return zerotune.ZeroEngine(
        module, make_optimizer(optimizer, module.parameters()), Knobs(**knobs), precision=precision
    )


def _step(engine: Any, rank: int, size: int, step: int) -> None:
    for x, y in micro_batches(rank, size, 1, step):
        engine.backward(mean_loss(engine(x), y))
    engine.step()


def moved_in_a_step(rank: int, size: int, knobs: dict[str, Any]) -> dict[str, Any]:
    engine = _engine("gpt", knobs)
    for step in range(3):
        _step(engine, rank, size, step)
    engine.begin_ledger()
    _step(engine, rank, size, 3)
    ledger = engine.end_ledger()
    (schedule,) = {s.digest: s for s in engine.schedules}.values()
    gathered = sum(e.elements for e in ledger.collectives if e.purpose in ("forward", "backward"))
    reduced = sum(e.elements for e in ledger.collectives if e.kind is CollectiveKind.REDUCE_SCATTER)
    sent = sum(e.sent_bytes for e in ledger.collectives)
    answer = {
        "gathered": gathered,
        "reduced": reduced,
        "sent": sent,
        "schedule_gathered": schedule.gathered_elements(engine.layout),
        "schedule_reduced": schedule.reduced_elements(engine.layout),
        "saved": sum(s.elements for s in schedule.savings),
        "padded": engine.layout.total_padded,
        "peak_live": ledger.peak_live_elements,
        "schedule_peak": schedule.peak_live,
        "largest_unit": max(engine.layout.padded(u) for u in range(len(engine.layout.units))),
        "purposes": sorted({e.purpose for e in ledger.collectives}),
        "kinds": sorted({e.kind.value for e in ledger.collectives}),
        "gradient_peak": ledger.peak[ByteClass.GRADIENT],
    }
    engine.close()
    return answer


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("release", ["after_use", "keep"])
@pytest.mark.parametrize("prefetch", [0, "auto", 10**6])
def test_what_moves_is_the_schedules_sum_and_3p_or_2p(ranks: int, release: str, prefetch: Any) -> None:
    knobs = {"param_persistence_threshold": 0, "release": release, "prefetch_distance": prefetch}
    for answer in run_on_ranks(ranks, moved_in_a_step, knobs):
        assert answer["gathered"] == answer["schedule_gathered"]
        assert answer["reduced"] == answer["schedule_reduced"] == answer["padded"]
        assert answer["gathered"] + answer["reduced"] + answer["saved"] == 3 * answer["padded"]
        if release == "keep":
            assert answer["gathered"] + answer["reduced"] == 2 * answer["padded"]
        assert answer["sent"] == 4 * (answer["gathered"] + answer["reduced"]) * (ranks - 1) // ranks
        assert answer["peak_live"] == answer["schedule_peak"]
        assert answer["kinds"] == ["all_gather", "reduce_scatter"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_demand_the_peak_is_the_largest_unit_and_its_buffer(ranks: int) -> None:
    knobs = {"param_persistence_threshold": 0, "prefetch_distance": 0}
    for answer in run_on_ranks(ranks, moved_in_a_step, knobs):
        assert answer["peak_live"] == 2 * answer["largest_unit"]


def layout_of_shards(rank: int, size: int) -> None:
    reference = make_model("gpt")
    engine = _engine("gpt", {"param_persistence_threshold": 0})
    values = dict(reference.named_parameters())
    total = 0
    for param in engine.shards.params:
        flat = values[param.name].detach().reshape(-1)
        start, end = slice_bounds(flat.numel(), size, rank)
        assert torch.equal(param.master.detach()[: end - start], flat[start:end]), param.name
        assert not param.master.detach()[end - start :].any(), f"padding of {param.name}"
        assert param.master.numel() == slice_numel(flat.numel(), size)
        storage = param.param.untyped_storage()
        if size > 1:
            assert storage.nbytes() == 0, f"{param.name} is full at rest"
        else:
            assert storage.data_ptr() == param.master.untyped_storage().data_ptr(), (
                "a rank alone holds it twice"
            )
        assert param.param.shape == values[param.name].shape
        total += param.master.numel()
    assert total * size == sum(padded_numel(p.numel(), size) for p in reference.parameters())
    slices, whole = engine.at_rest()[ByteClass.SHARD], engine.at_rest()[ByteClass.FULL]
    assert (slices, whole) == ((4 * total, 0) if size > 1 else (0, 4 * total))
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_holds_one_contiguous_slice_of_every_parameter(ranks: int) -> None:
    run_on_ranks(ranks, layout_of_shards)


def storages_during_a_step(rank: int, size: int, prefetch: int, release: str) -> None:
    """Count the bytes of full storages that are really allocated whenever a block runs."""
    engine = _engine(
        "gpt", {"param_persistence_threshold": 0, "prefetch_distance": prefetch, "release": release}
    )

    def full_bytes() -> int:
        storages = {p.param.untyped_storage()._cdata: p.param.untyped_storage() for p in engine.shards.params}
        return sum(storage.nbytes() for storage in storages.values())

    widths = [engine.layout.padded(u) * 4 for u in range(len(engine.layout.units))]
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(full_bytes())

    for block in engine.module.blocks:
        block.mlp.register_forward_hook(look)
        block.mlp.register_full_backward_hook(look)
    for step in range(3):
        seen.clear()
        _step(engine, rank, size, step)
        assert full_bytes() == 0, "full storages are left after a step"
        declared = sum(engine.layout.padded(unit) for gather in engine.next_opening for unit in gather.units)
        assert engine.ledger.live_elements == declared, "more than the next step's first gathers is live"
        assert bool(declared) is (prefetch > 0)
    if release == "after_use":
        assert max(seen) == max(widths[2:-2]), "more than the block in use is complete"
    else:
        assert max(seen) >= 3 * max(widths[2:-2])  # all three blocks are kept until backward
    engine.flush()
    assert engine.ledger.live_elements == 0
    assert engine.at_rest()[ByteClass.POOLED] == 0
    assert engine.at_rest()[ByteClass.FULL] == 0
    engine.close()


@pytest.mark.parametrize("prefetch", [0, 6000])
@pytest.mark.parametrize("release", ["after_use", "keep"])
def test_storages_are_really_freed(prefetch: int, release: str) -> None:
    run_on_ranks(2, storages_during_a_step, prefetch, release)


def states(rank: int, size: int, stage: int, precision: str) -> dict[str, int]:
    """Bytes by class between backward and step; of gradients at rest, too."""
    engine = _engine("gpt", {"stage": stage, "param_persistence_threshold": 0}, "adamw", precision)
    _step(engine, rank, size, 0)
    engine.flush()
    at_rest = engine.at_rest()[ByteClass.GRADIENT]
    ((x, y),) = micro_batches(rank, size, 1, 1)
    engine.backward(mean_loss(engine(x), y))
    engine.flush()
    answer = {k.value: v for k, v in engine.at_rest().items()} | {
        "padded": engine.layout.total_padded,
        "params": len(engine.shards.params),
        "gradient at rest": at_rest,
    }
    engine.step()
    engine.close()
    return answer


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stage_3_divides_every_state_by_the_ranks(ranks: int, precision: str) -> None:
    for answer in run_on_ranks(ranks, states, 3, precision):
        share = answer["padded"] // ranks
        step_counters = 4 * answer["params"]
        parameters = share * (4 if precision == "fp32" else 2)
        assert (answer["shard"], answer["full"]) == ((parameters, 0) if ranks > 1 else (0, parameters))
        assert answer["gradient"] == share * 4 and answer["gradient at rest"] == 0
        masters = 0 if precision == "fp32" else 4
        assert answer["optimizer"] == share * (8 + masters) + step_counters
        assert answer["pooled"] == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_stage_0_replicates_every_state(ranks: int) -> None:
    for answer in run_on_ranks(ranks, states, 0, "fp32"):
        assert answer["full"] == answer["gradient"] == 4 * answer["padded"]
        assert answer["optimizer"] == 8 * answer["padded"] + 4 * answer["params"]
        assert answer["shard"] == 0


def uneven_tokens(rank: int, size: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Ranks with different numbers of real tokens, over two micro-batches."""
    engine = _engine("gpt", {})
    losses = []
    for step in range(3):
        for x, y in micro_batches(rank, size, 2, step):
            kept = y.clone()
            kept[:, 4 + 5 * rank :] = -100
            count = int((kept != -100).sum())
            engine.backward(mean_loss(engine(x), kept), weight=count)
        losses.append(engine.step().loss)
    state = engine.full_state_dict()
    engine.close()
    return losses[-1], state


def test_the_loss_is_the_global_token_mean_however_tokens_fall() -> None:
    loss, state = run_on_ranks(2, uneven_tokens)[0]
    model = make_model("gpt")
    optimizer = make_optimizer("sgd", model.parameters())
    expected = 0.0
    for step in range(3):
        total, weight = torch.zeros(()), 0
        for rank in range(2):
            for x, y in micro_batches(rank, 2, 2, step):
                kept = y.clone()
                kept[:, 4 + 5 * rank :] = -100
                count = int((kept != -100).sum())
                total = total + mean_loss(model(x), kept) * count
                weight += count
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = float(total.detach() / weight)
    assert loss == pytest.approx(expected, abs=1e-5)
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, atol=1e-5), name
    assert BATCH % 4 == 0 and VOCABULARY > 0


def gradients_that_waited(rank: int, size: int, stage: int) -> list[int]:
    """One gradient waits when a window begins, as after a load; the others come with backward, and never waited.

    Returns:
        Bytes of gradients after each step.
    """
    engine = _engine("gpt", {"stage": stage})
    left = []
    for step in range(3):
        _step(engine, rank, size, step)
        left.append(engine.at_rest()[ByteClass.GRADIENT])
        for sharded in (engine.shards.trainable[0], engine.shards.trainable[-1])[: step + 1]:
            sharded.param.grad = torch.zeros(sharded.param.shape)
        engine._reducer.count_waiting()
    return left


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_waited_are_counted_once(stage: int, ranks: int) -> None:
    assert run_on_ranks(ranks, gradients_that_waited, stage) == [[0, 0, 0]] * ranks


class Hollow(torch.nn.Module):
    """A unit whose only parameter has no element, after one that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(0, 4, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) + self.blocks[1](x[:, :0])


def train_hollow(rank: int, size: int, stage: int, precision: str, gradient: str) -> list[float]:
    import zerotune

    module = Hollow()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine = zerotune.ZeroEngine(
        module,
        optimizer,
        Knobs(stage=stage),  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        gradient_dtype=gradient,  # type: ignore[arg-type]
    )
    losses = [0.0, 0.0]
    for step in range(2):
        engine.backward(engine(torch.ones(2, 4)).float().square().mean())
        losses[step] = engine.step().loss
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("precision", "gradient"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "compute")])
def test_a_unit_without_an_element_is_trained_beside_others(
    ranks: int, precision: str, gradient: str
) -> None:
    for stage in (0, 1, 3):
        for first, second in run_on_ranks(ranks, train_hollow, stage, precision, gradient):
            assert second < first

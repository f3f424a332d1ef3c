"""The engine on one CUDA device; skipped without one.

A rank that is alone gathers nothing; where gathers, releases and streams matter, :mod:`tests.zero.twins` plays the
second rank.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.bench import n1
from tests.zero.jobs import batch, make_model, make_optimizer, mean_loss
from tests.zero.twins import twins
from zerotune.config.knobs import Knobs
from zerotune.engine import RankGroup
from zerotune.train.memory import reset_peaks
from zerotune.zero.engine import ZeroEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
KNOBS = [{"stage": 0}, {"param_persistence_threshold": 0}, {"release": "keep"}, {"overlap_comm": False}]

SMALL = {
    "param_persistence_threshold": 0,
    "unit_size": 400,
    "allgather_bucket_size": 5000,
    "prefetch_distance": 9000,
}
"""Several units to a gather, several gathers in flight."""

FRAGMENTS = 1.5
"""Reserved over allocated memory, at most: what fragments cost."""


def engine_on(group: RankGroup, precision: str = "fp32", name: str = "adamw", **knobs: object) -> ZeroEngine:
    model = make_model("gpt").to(group.device)
    return ZeroEngine(
        model,
        make_optimizer(name, model.parameters()),
        Knobs(**knobs),  # type: ignore[arg-type]
        group=group,
        precision=precision,  # type: ignore[arg-type]
    )


def alone() -> RankGroup:
    return RankGroup(None, 0, 1, DEVICE)


def take_step(engine: ZeroEngine, step: int) -> float:
    x, y = (t.to(engine.group.device) for t in batch(step))
    engine.backward(mean_loss(engine(x), y))
    return engine.step().loss


def train(
    precision: str, knobs: dict[str, object], steps: int = 8, group: RankGroup | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = engine_on(group or alone(), precision, **knobs)
    losses = [take_step(engine, step) for step in range(steps)]
    state = engine.full_state_dict()
    engine.flush()
    assert engine.ledger.live_elements == 0
    engine.close()
    return losses, state


def plain(precision: str = "fp32", steps: int = 8) -> list[float]:
    """Losses of the plain loop; of ``bf16`` with fp32 masters, as the engine keeps them."""
    master = make_model("gpt").to(DEVICE)
    model = make_model("gpt").to(DEVICE)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model.to(dtype)
    optimizer = make_optimizer("adamw", master.parameters())
    losses = []
    for step in range(steps):
        x, y = (t.to(DEVICE) for t in batch(step))
        loss = mean_loss(model(x), y)
        loss.backward()
        for wide, narrow in zip(master.parameters(), model.parameters(), strict=True):
            assert narrow.grad is not None
            wide.grad, narrow.grad = narrow.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for wide, narrow in zip(master.parameters(), model.parameters(), strict=True):
                narrow.copy_(wide)
        losses.append(loss.item())
    return losses


def test_fp32_equals_the_plain_loop() -> None:
    expected = plain()
    for knobs in KNOBS:
        losses, _ = train("fp32", knobs)
        assert losses == pytest.approx(expected, abs=1e-4), knobs


def test_bf16_equals_the_plain_loop() -> None:
    """The same casts in the same places: what is left is the order in which kernels sum."""
    expected = plain("bf16")
    for knobs in KNOBS:
        losses, _ = train("bf16", knobs)
        assert losses == pytest.approx(expected, rel=5e-3), knobs


def test_knobs_do_not_change_a_bit_in_bf16() -> None:
    first, state = train("bf16", KNOBS[0])
    for knobs in KNOBS[1:]:
        losses, other = train("bf16", knobs)
        assert losses == first, knobs
        assert all(torch.equal(state[name], other[name]) for name in state), knobs


def test_knobs_do_not_change_a_bit_on_two_ranks() -> None:
    with twins(DEVICE) as group:
        first, state = train("bf16", SMALL, group=group)
        for knobs in KNOBS[1:]:
            losses, other = train("bf16", knobs, group=group)
            assert losses == first, knobs
            assert all(torch.equal(state[name], other[name]) for name in state), knobs


def test_released_parameters_leave_the_device() -> None:
    with twins(DEVICE) as group:
        engine = engine_on(group, name="sgd", param_persistence_threshold=0)
        for step in range(3):
            take_step(engine, step)
        engine.flush()
        assert all(p.param.untyped_storage().nbytes() == 0 for p in engine.shards.params)
        assert sum(engine.at_rest().values()) <= torch.cuda.memory_allocated(DEVICE)


# -------------------------------------------------------------------------------------------------- no host sync


@contextmanager
def syncing(mode: str) -> Iterator[None]:
    """What torch does where the host waits for the device: ``warn`` or ``error``."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_no_sync(engine: ZeroEngine) -> int:
    """Forward and backward of a steady step do not wait for the device; returns how often ``step()`` does."""
    for step in range(3):
        take_step(engine, step)
    x, y = (t.to(engine.group.device) for t in batch(3))
    with syncing("error"):
        engine.backward(mean_loss(engine(x), y))
    with syncing("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step()
    return len(caught)


@pytest.mark.parametrize("knobs", [*KNOBS, SMALL], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_forward_and_backward_do_not_wait_for_the_device(precision: str, knobs: dict[str, object]) -> None:
    print("alone, waits in step():", assert_no_sync(engine_on(alone(), precision, **knobs)))
    with twins(DEVICE) as group:
        print("two ranks, waits in step():", assert_no_sync(engine_on(group, precision, **knobs)))


# ------------------------------------------------------------------------------------------------- stream safety

_CYCLES = 2_000_000  # about a millisecond, many times what a kernel here takes


def sleeps_at_random(seed: int) -> Callable[[], None]:
    """Delays the current stream, or does not."""
    chance = random.Random(seed)

    def sleep() -> None:
        if chance.random() < 0.4:
            torch.cuda._sleep(chance.randrange(_CYCLES))

    return sleep


def train_twins(
    seed: int | None, precision: str, knobs: dict[str, object]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with collectives, modules and gradients delayed at random, or with nothing delayed."""
    sleep = (lambda: None) if seed is None else sleeps_at_random(seed)
    with twins(DEVICE, sleep) as group:
        engine = engine_on(group, precision, **knobs)

        def delay(module: nn.Module, args: object, output: torch.Tensor) -> None:
            sleep()
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda grad: sleep())

        for module in engine.module.modules():
            module.register_forward_hook(delay)  # type: ignore[arg-type]
        losses = []
        for step in range(6):
            losses.append(take_step(engine, step))
            sleep()
        state = engine.full_state_dict()
        engine.close()
    return losses, state


@pytest.mark.parametrize("knobs", [{}, {"release": "keep"}, SMALL, SMALL | {"stage": 2}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_delays_of_any_stream_change_no_bit(precision: str, knobs: dict[str, object]) -> None:
    losses, state = train_twins(None, precision, knobs)
    for seed in range(5):
        delayed, other = train_twins(seed, precision, knobs)
        assert delayed == losses, seed
        assert all(torch.equal(state[name], other[name]) for name in state), seed


# --------------------------------------------------------------------------------------------------------- memory


def test_peaks_are_what_the_ledger_says() -> None:
    """Allocated: the ledger's peak and what the model itself takes; reserved: that, and fragments."""
    module = n1.model(DEVICE)
    x, y = n1.batch(DEVICE)
    engine = ZeroEngine(module, n1.adamw(module.parameters()), group=alone())

    def step() -> None:
        engine.backward(mean_loss(engine(x), y))
        engine.step()

    for _ in range(3):
        step()
    engine.flush()
    at_rest = torch.cuda.memory_allocated(DEVICE)
    assert sum(engine.at_rest().values()) == pytest.approx(at_rest, rel=0.02)
    reset_peaks(DEVICE)
    engine.begin_ledger()
    step()
    ledger = engine.end_ledger()
    allocated = torch.cuda.max_memory_allocated(DEVICE)
    reserved = torch.cuda.max_memory_reserved(DEVICE)
    counted = sum(ledger.peak.values())  # classes peak at different moments
    activations = allocated - at_rest
    print(
        f"at rest {at_rest / 2**20:.1f} MiB, allocated {allocated / 2**20:.1f}, reserved {reserved / 2**20:.1f}"
    )
    assert activations > 0 and allocated <= counted + _kept_by_a_plain_step(x, y)
    assert reserved <= FRAGMENTS * allocated + 20 * 2**20  # the allocator's smallest large block is 20 MiB


def _kept_by_a_plain_step(x: torch.Tensor, y: torch.Tensor) -> int:
    """What forward and backward of the plain module allocate beside its parameters and gradients, at most."""
    module = n1.model(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    mean_loss(module(x), y).backward()
    return torch.cuda.max_memory_allocated(DEVICE) - before


def test_run_ahead_does_not_raise_the_peak() -> None:
    """However far the host is ahead of a slow device, buffers are reused in the order of the stream."""

    def peak(delay: bool) -> int:
        with twins(DEVICE) as group:
            engine = engine_on(group, **SMALL)
            for step in range(3):
                take_step(engine, step)
            torch.cuda.synchronize()
            reset_peaks(DEVICE)
            if delay:
                torch.cuda._sleep(100 * _CYCLES)
            take_step(engine, 3)
            found = torch.cuda.max_memory_allocated(DEVICE)
            engine.close()
        return found

    assert peak(delay=True) <= 1.01 * peak(delay=False)


# ------------------------------------------------------------------------------------------------------- one rank


def test_figures_of_one_rank() -> None:
    """Printed, not asserted: a step of the engine over one of a plain loop."""
    found = n1.measure(DEVICE, n1.SETTINGS, rounds=10, count=10)
    print("", torch.cuda.get_device_name(DEVICE), *n1.lines(found), sep="\n")
    assert found["plain"][0].value > 0

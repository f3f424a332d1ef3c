"""Real steps on real ranks with one thing wrong. Compute and the link are made of sleeps, so that a busy machine changes
little: a block takes 30 ms in each direction, and a collective lands no earlier than 15 ms after its issue for every block that
it carries."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from zerotune.config.knobs import Knobs
from zerotune.records import Ledger
from zerotune.zero.direct import Direct, Landing
from zerotune.zero.engine import ZeroEngine
from zerotune.zero.flights import Place, bytes_in
from zerotune.zero.gatherer import Gatherer

COMPUTE_S = 0.030
LINK_S = 0.015
BLOCKS = 6
WIDTH = 64
ELEMENTS = 2 * (WIDTH + 1) * WIDTH


class _Slow(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


class Block(nn.Module):
    """A linear layer, and time."""

    def __init__(self, inner: int, seconds: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _Slow.apply(self.down(self.up(x)), self.seconds)


class _Late:
    """A collective that lands no earlier than the link allows."""

    def __init__(self, work: Landing, elements: int) -> None:
        self._work = work
        self._lands = time.perf_counter() + LINK_S * elements / ELEMENTS

    def wait(self, timeout: timedelta) -> bool:
        time.sleep(max(0.0, self._lands - time.perf_counter()))
        return self._work.wait(timeout)


def _late(collective: Callable[..., Landing], size: int) -> Callable[..., _Late]:
    def late(direct: Direct, output: torch.Tensor, *rest: Any) -> _Late:
        # The output holds no row of the rank's own.
        return _Late(collective(direct, output, *rest), output.numel() // (size - 1) * size)

    return late


def _late_pieces(collective: Callable[..., Landing], size: int) -> Callable[..., _Late]:
    def late(direct: Direct, sources: Mapping[int, Sequence[Place]], *rest: Any) -> _Late:
        width = max(map(bytes_in, sources.values())) // 4
        return _Late(collective(direct, sources, *rest), width * size)

    return late


def _release_at_the_end(patches: ExitStack) -> None:
    """Units are released with the pass, not after their uses."""
    release, release_all = Gatherer.release, Gatherer.release_all

    def everything(gatherer: Gatherer) -> None:
        with patch.object(Gatherer, "release", release):
            release_all(gatherer)

    patches.enter_context(patch.object(Gatherer, "release", lambda gatherer, units: None))
    patches.enter_context(patch.object(Gatherer, "release_all", everything))


def steps_ledger(rank: int, size: int, knobs: dict[str, Any], fault: str = "") -> Ledger:
    """Train a few steps and record the last."""
    seconds = COMPUTE_S * (3 if fault == "slow rank" and rank == 1 else 1)
    model = nn.Sequential(
        *(Block(9 * WIDTH if fault == "huge unit" and i == 2 else WIDTH, seconds) for i in range(BLOCKS))
    )
    sizes = {
        "prefetch_distance": ELEMENTS, "reduce_bucket_size": ELEMENTS, "allgather_bucket_size": ELEMENTS,
        "param_persistence_threshold": 0,
    }  # fmt: skip
    with (
        ExitStack() as patches,
        patch.object(Direct, "all_gather", _late(Direct.all_gather, size)),
        patch.object(Direct, "exchange", _late(Direct.exchange, size)),
        patch.object(Direct, "exchange_pieces", _late_pieces(Direct.exchange_pieces, size)),
    ):
        if fault == "release never":
            _release_at_the_end(patches)
        engine = ZeroEngine(
            model, torch.optim.SGD(model.parameters(), lr=1e-3), Knobs.model_validate(sizes | knobs)
        )
        try:
            for step in range(4):
                if step == 3:
                    engine.begin_ledger()
                x = torch.randn(4, WIDTH, requires_grad=True)
                engine.backward(engine(x).square().mean())
                engine.step()
            return engine.end_ledger()
        finally:
            engine.close()

"""Every peer trains what the plain process trains, or the comparison says nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ranks import end_pool, run_on_ranks
from tests.zero.jobs import Case, largest_difference, make_model, mean_loss, micro_batches, train_plain
from zerotune.config.errors import UsageError
from zerotune.engine.group import RankGroup
from zerotune.peers import PeerSetup, build_peer
from zerotune.records import ByteClass
from zerotune.records.bench import PEERS

STEPS = 4
LIMIT_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def _processes_of_their_own() -> Iterator[None]:
    """These libraries change torch where they find it."""
    yield
    end_pool(2)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1, fused=True)


def train_peer(rank: int, size: int, name: str, accumulation: int, clip: float | None) -> Any:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # DeepSpeed asks for it, and does not use it
    os.environ.setdefault("MASTER_PORT", "0")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    setup = PeerSetup(adamw, accumulation, 12 // size // accumulation, clip)
    peer = build_peer(name, make_model("gpt"), setup, RankGroup.default("cpu"))
    losses = []
    for step in range(STEPS):
        for x, y in micro_batches(rank, size, accumulation, step):
            peer.backward(mean_loss(peer(x), y), weight=float(y.numel()))
        losses.append(peer.step().loss)
    held = peer.at_rest()
    state = peer.full_state_dict()
    peer.close()
    return losses, state, held


@pytest.mark.parametrize(
    "name",
    # DeepSpeed compiles an extension at its first use, which takes a minute: with make matrix.
    [pytest.param(n, marks=pytest.mark.matrix if n.startswith("deepspeed") else ()) for n in PEERS],
)
@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (2, 0.5)])
def test_it_trains_as_the_plain_process(name: str, accumulation: int, clip: float | None) -> None:
    first, second = run_on_ranks(2, train_peer, name, accumulation, clip, limit=LIMIT_S)
    plain = train_plain(Case(optimizer="adamw", clip=clip, steps=STEPS))
    means = [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)]
    assert means == pytest.approx(plain.losses, abs=1e-5)
    for _, state, _ in (first, second):
        difference, where = largest_difference({k: state[k] for k in plain.state}, plain.state)
        assert difference < 1e-5, where


def test_what_is_at_rest() -> None:
    numel = sum(p.numel() for p in make_model("gpt").parameters())
    for name, shares in (("ddp", (1, 1, 2)), ("fsdp2", (0.5, 0, 1))):
        held = run_on_ranks(2, train_peer, name, 1, None, limit=LIMIT_S)[0][2]
        wanted = dict(zip((ByteClass.SHARD, ByteClass.GRADIENT, ByteClass.OPTIMIZER), shares, strict=True))
        for kind, share in wanted.items():
            # DDP's buckets, FSDP2's padding of rows, and the optimizer's counters.
            assert held[kind] == pytest.approx(4 * share * numel, rel=0.05, abs=200), (name, kind)


def uneven(rank: int, size: int) -> str:
    peer = build_peer("ddp", make_model("gpt"), PeerSetup(adamw, 2, 3), RankGroup.default("cpu"))
    (x, y), (u, v) = micro_batches(rank, size, 2, 0)
    peer.backward(mean_loss(peer(x), y), weight=6.0)
    loss = mean_loss(peer(u), v)
    try:
        peer.backward(loss, weight=5.0)
    except UsageError as error:
        return str(error)
    return "no error"


def test_micro_batches_that_weigh_differently_are_refused() -> None:
    for text in run_on_ranks(2, uneven):
        assert "these weigh 6 and 5 items" in text

"""Gradients that are sent from where autograd put them: every bit arrives, and nothing is copied first."""

from __future__ import annotations

import os
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_on_ranks
from tests.zero.test_direct import CARRIERS, group_of
from zerotune.config.knobs import Knobs
from zerotune.engine import LedgerKeeper, RankGroup, slots
from zerotune.records import ByteClass
from zerotune.schedule import Bucket, ParamRef
from zerotune.zero import direct, neighbours, wiring
from zerotune.zero.comm import Communicator
from zerotune.zero.flights import Place, after, bytes_in, place_of


def test_what_is_left_of_pieces() -> None:
    pieces = [Place(100, 3), Place(200, 0), Place(300, 5)]
    assert bytes_in(pieces) == 8
    for count in range(9):
        left = list(after(pieces, count))
        expected = [address + i for address, nbytes in pieces for i in range(nbytes)][count:]
        assert [address + i for address, nbytes in left for i in range(nbytes)] == expected
        assert all(nbytes for _, nbytes in left[:1])


def cut(tensor: torch.Tensor, moods: random.Random) -> tuple[list[torch.Tensor], list[Place]]:
    """Copies of random pieces of a tensor, some of them empty, each in memory of its own; and where they are."""
    ends = sorted(moods.randint(0, len(tensor)) for _ in range(moods.randint(0, 6)))
    pieces = [tensor[start:end].clone() for start, end in zip([0, *ends], [*ends, len(tensor)], strict=True)]
    return pieces, [place_of(piece) for piece in pieces]


def two_hosts(rank: int, size: int) -> RankGroup:
    """Ranks 0 and 1 on one host, 2 and 3 on another."""
    with mock.patch.object(slots, "this_node", lambda: f"host {rank // 2}"):
        process_group = dist.new_group(backend="gloo")
        direct.direct_between(process_group, rank, size)
    return RankGroup(process_group, rank, size, torch.device("cpu"))


def exchange_pieces(rank: int, size: int, carrier: str, width: int, share: float) -> float:
    """Rows cut anywhere on one side, and elsewhere on the other; a share of their values are zeros."""
    group = two_hosts(rank, size) if carrier == "both" else group_of(rank, size, carrier)
    comm = Communicator(group, LedgerKeeper(rank), overlap=True)
    assert comm.carries_pieces
    moods = random.Random(rank)
    flying = []
    for number in range(4):
        generator = torch.Generator().manual_seed(10 * number + rank)
        rows = torch.randn(size, width, generator=generator)
        rows[:, torch.rand(width // 512 + 1, generator=generator).repeat_interleave(512)[:width] < share] = 0
        others = [r for r in range(size) if r != rank]
        sent = {r: cut(rows[r], moods) for r in others}
        received = {r: cut(torch.full((width,), -1.0), moods) for r in others}
        kept = [piece for cuts in (sent, received) for pieces, _ in cuts.values() for piece in pieces]
        work = comm.exchange_pieces(
            {r: places for r, (_, places) in sent.items()},
            {r: places for r, (_, places) in received.items()},
            tuple(kept), size * width, "gradient", [f"unit{number}"],
        )  # fmt: skip
        flying.append((work, received, rows))
    for work, received, rows in reversed(flying):
        work.wait()
        everyone = [torch.empty_like(rows) for _ in range(size)]
        torch.distributed.all_gather(everyone, rows)
        for sender, (pieces, _) in received.items():
            assert torch.equal(torch.cat(pieces), everyone[sender][rank])
    return flying[0][0].left_out


@pytest.mark.parametrize("carrier", ["neighbours", "wires"])
@pytest.mark.parametrize(("width", "share"), [(0, 0.0), (7, 0.0), (300_000, 0.0), (300_000, 0.95)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_pieces_arrive_in_other_pieces(ranks: int, width: int, share: float, carrier: str) -> None:
    for left_out in run_on_ranks(ranks, exchange_pieces, carrier, width, share):
        assert (left_out > 0.5) == (share > 0.5 and carrier == "wires")


def test_pieces_go_to_neighbours_and_over_wires_at_once() -> None:
    assert run_on_ranks(4, exchange_pieces, "both", 3000, 0.0) == [0.0] * 4


def carries_pieces(rank: int, size: int, carrier: str) -> bool:
    if carrier != "some wires":
        return Communicator(group_of(rank, size, carrier), LedgerKeeper(rank), True).carries_pieces
    switched = {neighbours.SWITCH: "0", wiring.SWITCH: "1"}
    if rank == 1:  # it has none, and the other two have one to each other
        switched[wiring.SWITCH] = "0"
    with mock.patch.dict(os.environ, switched):
        process_group = dist.new_group(backend="gloo")
        found = direct.direct_between(process_group, rank, size)
    assert found._by_gloo == {0: [1], 1: [2, 0], 2: [1]}[rank]
    return Communicator(
        RankGroup(process_group, rank, size, torch.device("cpu")), LedgerKeeper(rank), True
    ).carries_pieces


@pytest.mark.parametrize("carrier", ["gloo", "some wires"])
def test_gloo_carries_none(carrier: str) -> None:
    assert run_on_ranks(3, carries_pieces, carrier) == [False] * 3


class Two(nn.Module):
    """Has a weight that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.randn(48, 5) / 48)
        self.sometimes = nn.Parameter(torch.randn(48, 5) / 48)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return x @ self.always + (x @ self.sometimes if both else 0)


class Layers(nn.Module):
    """Parameters that are padded on some ranks, on all, or on none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(48, 48), nn.Linear(48, 48)])
        self.odd = nn.Linear(48, 5)
        self.two = Two()

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.odd(x) + self.two(x, both)


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 48, generator=torch.Generator().manual_seed(100 * step + rank))


def layers() -> Layers:
    torch.manual_seed(0)
    return Layers()


def largest_difference(engine: Any, plain: nn.Module) -> float:
    """Between any two weights of an engine and a plain module; NaN if there is one."""
    state = engine.full_state_dict()
    differences = [(state[name] - value).reshape(-1) for name, value in plain.state_dict().items()]
    return torch.cat(differences).abs().max().item()


def train_layers(
    rank: int, size: int, carrier: str, accumulation: int, bucket: int, spared: bool
) -> set[str]:
    """Three steps beside a plain loop; returns the parameters whose gradients travelled from where they were.

    Where a weight is to be spared, rank 0 has no gradient for it.
    """
    import zerotune

    plain, module = layers(), layers()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, module)]
    knobs = Knobs(reduce_bucket_size=bucket, param_persistence_threshold=0)
    engine = zerotune.ZeroEngine(module, optimizers[1], knobs, group_of(rank, size, carrier))
    grads: dict[str, Place] = {}
    for param in engine.shards.params:
        param.param.register_post_accumulate_grad_hook(
            lambda p, name=param.name: grads.__setitem__(name, place_of(p.grad))
        )
    in_place: set[str] = set()
    exchange = engine._comm.exchange_pieces

    def look(sources: dict[int, list[Place]], *args: Any) -> Any:
        for address, _ in (place for places in sources.values() for place in places):
            in_place.update(
                name for name, (start, nbytes) in grads.items() if start <= address < start + nbytes
            )
        return exchange(sources, *args)

    engine._comm.exchange_pieces = look  # type: ignore[method-assign]
    for step in range(3):
        for micro in range(accumulation):
            for sender in range(size):
                output = plain(inputs(sender, 10 * step + micro), both=sender > 0 or not spared)
                (output.square().mean() / (size * accumulation)).backward()
            grads.clear()
            output = engine(inputs(rank, 10 * step + micro), both=rank > 0 or not spared)
            engine.backward(output.square().mean())
        optimizers[0].step()
        optimizers[0].zero_grad()
        engine.step()
    difference = largest_difference(engine, plain)
    assert engine.at_rest()[ByteClass.GRADIENT] == 0
    engine.close()
    assert difference < 1e-6
    return in_place


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("spared", [False, True])
@pytest.mark.parametrize(("accumulation", "bucket"), [(1, 3000), (3, 100), (2, 10**6)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_travel_from_where_they_are(
    ranks: int, accumulation: int, bucket: int, spared: bool, carrier: str
) -> None:
    answers = run_on_ranks(ranks, train_layers, carrier, accumulation, bucket, spared)
    for rank, in_place in enumerate(answers):
        # Of what is so small that all of it is rank 0's, that one sends what pads it alone.
        sent = {name for name, param in Layers().named_parameters() if rank or param.numel() > 16}
        if carrier == "gloo":
            assert not in_place
        elif rank or not spared:
            assert in_place == sent
        elif bucket == 10**6:
            assert not in_place, "a gradient that is missing takes along those of its bucket"
        else:
            assert "two.sometimes" not in in_place
            assert in_place >= {name for name in sent if name.startswith("blocks")}


def odd(gradient: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in memory that is a part of something larger, in another order, or less than they are."""
    if how == "part":
        larger = torch.full((gradient.numel() + 1,), 1e9)
        larger[1:] = gradient.view(-1)
        return larger[1:].view(gradient.shape)
    if how == "transposed":
        return gradient.T.contiguous().T
    return gradient[:1].clone().expand(gradient.shape)


class Many(nn.Module):
    """So many parameters that a bucket of them is sent in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.full((48,), i / 300) for i in range(300)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ torch.stack(list(self.weights)).T)


def train_copied(rank: int, size: int, how: str) -> float:
    """Three steps beside a plain loop, all gradients copied into buckets; returns the largest difference."""
    import zerotune

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Many() if how == "many" else nn.Linear(48, 32, bias=False))
    plain, module = models
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models]
    knobs = Knobs(param_persistence_threshold=0, reduce_bucket_size=10**6)
    engine = zerotune.ZeroEngine(module, optimizers[1], knobs, group_of(rank, size, "neighbours"))
    if how != "many":
        for param in models:
            param.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", odd(p.grad, how)))
    forbidden = mock.Mock(side_effect=AssertionError("it was sent from where it is"))
    with mock.patch.object(engine._comm, "exchange_pieces", forbidden):
        for step in range(3):
            total = torch.zeros(())
            for sender in range(size):
                total = total + plain(inputs(sender, step)).square().mean() / size
            total.backward()
            engine.backward(engine(inputs(rank, step)).square().mean())
            optimizers[0].step()
            optimizers[0].zero_grad()
            engine.step()
    difference = largest_difference(engine, plain)
    engine.close()
    return difference


@pytest.mark.parametrize("how", ["part", "transposed", "expanded", "many"])
def test_gradients_of_odd_memory_and_very_many_are_copied_first(how: str) -> None:
    for difference in run_on_ranks(2, train_copied, how):
        assert difference < 1e-6


def two_buckets_of_a_unit(rank: int, size: int) -> tuple[list[float], list[float]]:
    """A bucket with a part of a unit is under way when one with all of it begins; returns both parameters' sums."""
    import zerotune

    module = nn.Linear(64, 64)
    knobs = Knobs(param_persistence_threshold=0)
    group = group_of(rank, size, "neighbours")
    engine = zerotune.ZeroEngine(module, torch.optim.SGD(module.parameters(), lr=0.1), knobs, group)
    reducer = engine._executor._reducer
    weight, bias = engine.shards.params
    refs = (weight.ref, bias.ref)

    def give(number: int, *refs: ParamRef) -> None:
        for ref in refs:
            param = engine.shards[ref].param
            param.grad = torch.full(tuple(param.shape), 10.0**number * (rank + 1))
        reducer.collect(number, Bucket(refs), refs)
        reducer.reduce(number)

    for number, which in enumerate([refs[:1], refs, refs[1:]]):
        give(number, *which)
    reducer.drain()
    assert weight.grad is not None and bias.grad is not None
    sums = weight.grad.tolist(), bias.grad[: bias.numel // size].tolist()
    engine.close()
    return sums


@pytest.mark.parametrize("ranks", [2, 4])
def test_buckets_of_one_unit_follow_one_another(ranks: int) -> None:
    total = sum(range(1, ranks + 1))
    for weight, bias in run_on_ranks(ranks, two_buckets_of_a_unit):
        assert set(weight) == {11.0 * total} and set(bias) == {110.0 * total}

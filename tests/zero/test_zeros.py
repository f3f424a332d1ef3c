"""Rows without their zeros: every bit arrives, whatever the row, and none that is not needed travels."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.ranks import run_on_ranks
from tests.zero.test_direct import CARRIERS, group_of
from zerotune import ZeroEngine
from zerotune.config.knobs import Knobs
from zerotune.engine import LedgerKeeper
from zerotune.zero.comm import Communicator
from zerotune.zero.zeros import BLOCK_BYTES, most_bytes, pack, unpack

MANY = 64


def unpacked(packed: bytes, nbytes: int) -> bytearray:
    row = bytearray(b"\xff" * nbytes)
    unpack(memoryview(packed), [memoryview(row)])
    return row


@given(
    count=st.integers(MANY, 300),
    rest=st.integers(0, BLOCK_BYTES - 1),
    held=st.dictionaries(st.integers(0, 2**31), st.integers(0, 255), max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_every_byte_comes_back(count: int, rest: int, held: dict[int, int]) -> None:
    row = bytearray(count * BLOCK_BYTES + rest)
    for place, value in held.items():
        row[place % len(row)] = value
    packed = pack(memoryview(row))
    blocks = {at // BLOCK_BYTES for at in range(count * BLOCK_BYTES) if row[at]}
    if packed is None:
        assert len(blocks) > 4, "few hold anything, and yet all travel"
        return
    assert (
        sum(part.nbytes for part in packed)
        == count + len(blocks) * BLOCK_BYTES + rest
        <= most_bytes(len(row))
    )
    assert unpacked(b"".join(packed), len(row)) == row


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_is_full_travels_as_it_is(share: float) -> None:
    row = bytearray(400 * BLOCK_BYTES)
    for block in random.Random(0).sample(range(400), int(share * 400)):
        row[block * BLOCK_BYTES] = 1
    assert pack(memoryview(row)) is None


def test_what_is_full_where_it_was_not_probed_travels_as_it_is() -> None:
    row = bytearray(b"\x01" * 320 * BLOCK_BYTES)
    for block in range(0, 320, 10):
        row[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes(BLOCK_BYTES)
    assert pack(memoryview(row)) is None


def test_a_short_row_travels_as_it_is() -> None:
    assert pack(memoryview(bytearray((MANY - 1) * BLOCK_BYTES))) is None
    assert pack(memoryview(bytearray())) is None


@pytest.mark.parametrize("change", [-1, 1, BLOCK_BYTES])
def test_a_packed_row_of_another_length_than_it_says_is_refused(change: int) -> None:
    row = bytearray(100 * BLOCK_BYTES)
    row[777] = 7
    packed = b"".join(pack(memoryview(row)) or ())
    packed = packed + bytes(change) if change > 0 else packed[:change]
    with pytest.raises(ValueError, match="of which 1 blocks"):
        unpacked(packed, len(row))


def gradients_with_few_rows(rank: int, size: int, carrier: str, dtype: torch.dtype) -> list[bool]:
    """What an embedding leaves: nothing in most rows, and once nothing at all, with bits that a sum would change.

    Returns:
        For every exchange, whether most of it stayed away.
    """
    ledger = LedgerKeeper(rank)
    ledger.begin()
    comm = Communicator(group_of(rank, size, carrier), ledger, overlap=True)
    rows, width = 4099, 48
    whole = torch.full((rows * width,), 0.5, dtype=dtype)
    flying = []
    for number, is_whole in enumerate([False, True, False, False, True]):
        sent = torch.zeros(size, rows, width, dtype=dtype)
        for to in range(size):
            used = torch.randperm(rows, generator=torch.Generator().manual_seed(100 * rank + to))[
                : 30 * number
            ]
            sent[to, used] = 1.0 + to + 10 * rank
            sent[to, used[::3], 5] = -0.0
            sent[to, used[1::3], 7] = float("nan")
            sent[to, -1, -1] = 3.0
        if is_whole:
            sent[:] = whole.view(rows, width)
        received = torch.full(((size - 1) * rows * width,), -1.0, dtype=dtype)
        flying.append((sent, received, comm.exchange(received, sent.view(-1), "gradient", [f"unit{number}"])))
    for sent, received, work in flying:
        work.wait()
        everyone = [torch.empty_like(sent) for _ in range(size)]
        torch.distributed.all_gather(everyone, sent)
        rows_there = comm.rows_in_order(received, sent[rank].reshape(-1))
        for sender, row in enumerate(rows_there):
            expected = everyone[sender][rank].reshape(-1)
            assert torch.equal(row.view(torch.int16), expected.view(torch.int16))
    entries = ledger.end().collectives
    for entry, (sent, _, _) in zip(entries, flying, strict=True):
        of_others = (size - 1) * sent[0].nbytes
        assert entry.sent_bytes + entry.left_out_bytes == of_others
        is_sparse = bool((sent == 0).any())
        assert (entry.left_out_bytes > 0.7 * of_others) == (is_sparse and carrier == "wires")
        assert entry.left_out_bytes == 0 or entry.left_out_bytes < of_others
    return [entry.left_out_bytes > entry.sent_bytes for entry in entries]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_with_few_rows_arrive_bit_by_bit(ranks: int, carrier: str, dtype: torch.dtype) -> None:
    found = run_on_ranks(ranks, gradients_with_few_rows, carrier, dtype)
    few = carrier == "wires"
    assert found == [[few, False, few, few, False]] * ranks


class Tagger(nn.Module):
    """An embedding of many tokens, few of which a batch holds, and a layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4096, 48)
        self.head = nn.Linear(48, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(tokens)).square().mean()


def train(rank: int, size: int, carrier: str) -> tuple[dict[str, torch.Tensor], int, int, dict[int, float]]:
    """Parameters after some steps; of the last one the bytes of reductions that were sent and left out, and the share that
    was left out of each unit's."""
    torch.manual_seed(0)
    module = Tagger()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    engine = ZeroEngine(
        module,
        optimizer,
        Knobs(param_persistence_threshold=0),
        group=group_of(rank, size, carrier),
        clip_norm=1.0,
    )
    for step in range(3):
        engine.begin_ledger()
        tokens = torch.randint(4096, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(tokens))
        engine.step()
        ledger = engine.end_ledger()
    reductions = [entry for entry in ledger.collectives if entry.purpose == "gradient"]
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    shares = dict(engine._executor.left_out)
    engine.close()
    sent, left_out = (
        sum(entry.sent_bytes for entry in reductions),
        sum(entry.left_out_bytes for entry in reductions),
    )
    return state, sent, left_out, shares


def test_training_is_the_same_without_the_zeros() -> None:
    found = {carrier: run_on_ranks(2, train, carrier) for carrier in CARRIERS}
    whole = found["gloo"][0][1]
    for carrier, ranks in found.items():
        for (state, sent, left_out, shares), (expected, *_) in zip(ranks, found["gloo"], strict=True):
            assert all(torch.equal(state[name], value) for name, value in expected.items())
            assert sent + left_out == whole
            assert left_out > 0.9 * whole if carrier == "wires" else left_out == 0
            sparse = {unit for unit, share in shares.items() if 0.9 < share < 1.0}
            assert sparse == ({0} if carrier == "wires" else set()), "the embedding's alone"
            assert not any(share for unit, share in shares.items() if unit not in sparse)

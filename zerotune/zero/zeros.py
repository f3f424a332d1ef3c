"""Leaving out what is zero: most of an embedding's gradient is, and it is the last to be reduced, beside nothing.

A gradient has as many rows as the vocabulary, and values in those alone whose tokens the micro-batch held; an expert that
saw no token has none at all. Such a row of a collective travels as its blocks that hold anything, after a byte for every
block that says whether it does. The other end puts zeros in place of the rest: every bit arrives, that of -0.0 too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 512
"""Smaller than a row of any embedding worth the while; a byte more in 512 for what does not travel."""

_LEAST_BLOCKS = 64
"""Shorter rows travel as they are: they cost less than looking through them."""

MOST_HELD = 0.25
"""Share of blocks that may hold something: it bounds what packing allocates, and beyond it there is less to win."""

_PROBES = 8
"""Blocks that are looked at before all are: rows of full gradients and of weights are told by them, in microseconds."""

_NOTHING = bytes(BLOCK_BYTES)


class Packed(NamedTuple):
    """A row without its zeros.

    Attributes:
        held: For every whole block a byte, 1 if it holds anything.
        blocks: Those blocks, one after the other.
        tail: What is left of the row after its last whole block.
    """

    held: memoryview
    blocks: memoryview
    tail: memoryview


def _blocks_of(row: memoryview, count: int) -> npt.NDArray[np.int64]:
    return np.frombuffer(row, np.int64, count * BLOCK_BYTES // 8).reshape(count, BLOCK_BYTES // 8)


def _bytes_of(array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def may_pack(row: memoryview) -> bool:
    """Whether it is worth the while to look through a row, or a piece of one."""
    count = row.nbytes // BLOCK_BYTES
    if count < _LEAST_BLOCKS:
        return False
    probes = range(0, count * BLOCK_BYTES, -(-count // _PROBES) * BLOCK_BYTES)
    return sum(row[at : at + BLOCK_BYTES] != _NOTHING for at in probes) <= _PROBES // 2


def pack(row: memoryview) -> Packed | None:
    """A row without its zeros, if there are many; the blocks and what tells of them are copies.

    Args:
        row: Its bytes.
    """
    if not may_pack(row):
        return None
    count = row.nbytes // BLOCK_BYTES
    whole = count * BLOCK_BYTES
    blocks = _blocks_of(row, count)
    held = np.asarray(blocks.any(axis=1))
    if int(np.count_nonzero(held)) > MOST_HELD * count:
        return None
    return Packed(_bytes_of(held), _bytes_of(blocks[held]), row[whole:])


def most_bytes(nbytes: int) -> int:
    """Of a packed row, at most, where the row has ``nbytes``."""
    return nbytes + nbytes // BLOCK_BYTES


def unpack(packed: memoryview, pieces: Sequence[memoryview]) -> None:
    """Put a packed row in its place.

    Args:
        packed: The three parts of :class:`Packed`, one after the other.
        pieces: Where it goes, piece after piece; all of it is written.

    Raises:
        ValueError: It is not as long as it says.
    """
    if len(pieces) != 1:
        whole = memoryview(bytearray(sum(piece.nbytes for piece in pieces)))
        unpack(packed, [whole])
        start = 0
        for piece in pieces:
            piece[:] = whole[start : start + piece.nbytes]
            start += piece.nbytes
        return
    (row,) = pieces
    count = row.nbytes // BLOCK_BYTES
    held = np.frombuffer(packed[:count], np.bool_)
    tail = count * BLOCK_BYTES
    number = int(np.count_nonzero(held))
    if packed.nbytes != count + number * BLOCK_BYTES + row.nbytes - tail:
        raise ValueError(f"a row of {row.nbytes} bytes came as {packed.nbytes}, of which {number} blocks")
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(row)), 0, tail)
    _blocks_of(row, count)[held] = _blocks_of(packed[count:], number)
    row[tail:] = packed[count + number * BLOCK_BYTES :]

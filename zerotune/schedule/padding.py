"""How one parameter is flattened, padded and split over the ranks."""

from __future__ import annotations

SLICE_MULTIPLE = 16
"""Slices are multiples of this many elements, so that vectorised optimizers see the same lanes for every N.

A fused AdamW treats the tail of a tensor with scalar instructions, whose rounding differs from the vector ones; with
16 elements there is no tail for 4- and 2-byte types on AVX-512, AVX2 and NEON alike.
"""


def slice_numel(numel: int, ranks: int) -> int:
    """Elements of the contiguous slice that each rank owns of a parameter, padding included.

    Args:
        numel: Elements of the parameter.
        ranks: Number of ranks, N.

    Returns:
        The smallest multiple of 16 whose N-fold covers the parameter (0 for an empty parameter).
    """
    per_rank = -(-numel // ranks)
    return -(-per_rank // SLICE_MULTIPLE) * SLICE_MULTIPLE


def padded_numel(numel: int, ranks: int) -> int:
    """Elements of the flattened parameter with its padding: N slices."""
    return slice_numel(numel, ranks) * ranks


def slice_bounds(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """The real elements ``[start, end)`` of the flattened parameter that a rank owns; empty where it owns padding."""
    size = slice_numel(numel, ranks)
    start = min(rank * size, numel)
    return start, min(start + size, numel)

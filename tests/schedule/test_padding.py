"""Slices: contiguous, equal, disjoint, covering."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerotune.schedule import padded_numel, slice_bounds, slice_numel

sizes = st.integers(0, 10_000)
ranks = st.integers(1, 9)


@given(sizes, ranks)
def test_slices_are_multiples_of_16_and_waste_less_than_16_per_rank(numel: int, n: int) -> None:
    size = slice_numel(numel, n)
    assert size % 16 == 0
    assert numel <= size * n == padded_numel(numel, n)
    assert size * n - numel < 16 * n + n


@given(sizes, ranks)
def test_slices_cover_every_element_once_in_rank_order(numel: int, n: int) -> None:
    covered = []
    for rank in range(n):
        start, end = slice_bounds(numel, n, rank)
        assert end - start <= slice_numel(numel, n)
        covered.extend(range(start, end))
    assert covered == list(range(numel))

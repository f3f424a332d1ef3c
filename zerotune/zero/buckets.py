"""What a reduction is made of: the members of a bucket, a bucket that is being filled, and one under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from zerotune.schedule import Bucket, ParamRef, slice_bounds
from zerotune.zero.carrier import MOST_PIECES
from zerotune.zero.comm import Work
from zerotune.zero.flights import Place
from zerotune.zero.shards import ShardedParam, ShardStore


class Members:
    """What is known of a bucket for good.

    Args:
        bucket: The bucket.
        shards: Where its members are.
        ranks: Number of ranks, N.
    """

    def __init__(self, bucket: Bucket, shards: ShardStore, ranks: int) -> None:
        self.bucket = bucket
        self._ranks = ranks
        self.params = [shards[ref] for ref in bucket.params]
        self.owners = [param.param for param in self.params]
        self.names = tuple(param.name for param in self.params)
        self.units = list(dict.fromkeys(ref.unit for ref in bucket.params))
        self.sizes = [param.slice for param in self.params]
        self.width = sum(self.sizes)
        self.are_even = all(0 < param.numel == ranks * param.slice for param in self.params)
        """Whether none of them is padded, nor empty."""
        self.may_travel_in_pieces = 2 * len(self.params) <= MOST_PIECES
        self._bounds: dict[int, list[tuple[int, int]]] = {}
        ends = list(accumulate(self.sizes))
        self.columns = {
            ref: slice(end - size, end)
            for ref, size, end in zip(bucket.params, self.sizes, ends, strict=True)
        }
        self.compared_with: Sequence[ShardedParam] | None = None
        """What trained when ``are_whole_units`` was found."""
        self.are_whole_units = False
        """Whether they are all that trains of their units, in order."""

    def bounds(self, rank: int) -> list[tuple[int, int]]:
        """Where a rank's slice of each gradient begins and ends, without padding."""
        found = self._bounds.get(rank)
        if found is None:
            found = [slice_bounds(param.numel, self._ranks, rank) for param in self.params]
            self._bounds[rank] = found
        return found

    def pieces(self, grads: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """A rank's slices of the full gradients of all, without padding  # each 1D"""
        return [grad[start:end] for grad, (start, end) in zip(grads, self.bounds(rank), strict=True)]

    def places(self, grads: Sequence[torch.Tensor], rank: int, padding: torch.Tensor) -> list[Place]:
        """Where these slices are, and what pads them.

        Args:
            grads: Full gradients  # each 1D
            rank: Whose slices.
            padding: Zeros, as many as any of them may lack  # 1D
        """
        itemsize, zeros = padding.itemsize, padding.data_ptr()
        places: list[Place] = []
        for grad, (start, end), size in zip(grads, self.bounds(rank), self.sizes, strict=True):
            if end > start:
                places.append(Place(grad.data_ptr() + start * itemsize, (end - start) * itemsize))
            if end - start < size:
                places.append(Place(zeros, (size - end + start) * itemsize))
        return places


@dataclass
class Filling:
    """A bucket that is being filled: by gradients that stay where they are, until one cannot; then all are copied.

    Attributes:
        members: Whose gradients.
        stay: Those that have come and stay, flat, not padded  # each 1D
        rows: Where they are copied to; row r goes to rank r  # [N, W]
        collected: Whose have come.
    """

    members: Members
    stay: dict[ParamRef, torch.Tensor] = field(default_factory=dict)
    rows: torch.Tensor | None = None
    collected: list[Sequence[ParamRef]] = field(default_factory=list)


@dataclass
class Reduction:
    """A bucket being reduced.

    Attributes:
        members: Whose gradients.
        work: The collective.
        sent: The bucket  # [N * W]; or gradients that stay where they are, one by one, not padded  # each 1D
        stays: Whether they do.
        received: Rows to be summed, of all ranks, of all others, or of those whose row does not land in the shards'
            gradients, if there are any; or their sum  # [R * W]
        is_sum: Which of these.
        landing: The rank whose row lands in the shards' gradients, if one does.
    """

    members: Members
    work: Work
    sent: list[torch.Tensor]
    stays: bool
    received: torch.Tensor | None
    is_sum: bool = False
    landing: int | None = None

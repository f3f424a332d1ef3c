"""Two ranks on one device without a second process: what this rank would get from a twin that holds what it holds.

The engine takes the way that it takes with N ranks, side streams and all, while every collective is a copy on the stream
that it was issued on. What is trained so means nothing, for half of every parameter is its twin's; but the same operations
in the same order give the same bits, whatever delays them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerotune.engine import RankGroup

SIZE = 2


class _Done(dist.Work):
    """A collective that has been carried out, as far as the current stream is concerned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


@contextmanager
def twins(device: torch.device, before: Callable[[], None] = lambda: None) -> Iterator[RankGroup]:
    """A group of two ranks, of which this process is the first.

    Args:
        device: Of both.
        before: Called before every collective, on its stream.
    """

    def all_gather(output: torch.Tensor, mine: torch.Tensor, **_: Any) -> _Done:
        before()
        output.view(SIZE, -1).copy_(mine.reshape(1, -1).expand(SIZE, -1))
        return _Done()

    def all_to_all(output: torch.Tensor, rows: torch.Tensor, **_: Any) -> _Done:
        before()
        output.view(SIZE, -1).copy_(rows.view(SIZE, -1)[:1].expand(SIZE, -1))
        return _Done()

    def broadcast(tensor: torch.Tensor, **_: Any) -> _Done:
        return _Done()

    replaced = {"all_gather_single": all_gather, "all_to_all_single": all_to_all, "broadcast": broadcast}
    real = {name: getattr(dist, name) for name in replaced}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    for name, function in replaced.items():
        setattr(dist, name, function)
    try:
        yield RankGroup(dist.group.WORLD, 0, SIZE, device)
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
        dist.destroy_process_group()

"""The ranks that train together: the one place from which every collective takes its process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zerotune.engine.guard import guard_of, waited_on_host
from zerotune.records import CollectiveKind


@dataclass(frozen=True)
class RankGroup:
    """The data-parallel group as one rank sees it.

    Attributes:
        process_group: torch's group, or ``None`` for a single process without ``torch.distributed``.
        rank: This rank within the group.
        size: Number of ranks, N.
        device: Device of this rank's tensors.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    size: int
    device: torch.device

    @classmethod
    def default(cls, device: torch.device | str | None = None) -> RankGroup:
        """The default group of ``torch.distributed``, or a group of one if that is not initialised."""
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        if not dist.is_available() or not dist.is_initialized():
            return cls(None, 0, 1, torch.device(device))
        group = dist.group.WORLD
        return cls(group, dist.get_rank(group), dist.get_world_size(group), torch.device(device))

    @property
    def backend(self) -> str:
        """``gloo``, ``nccl``, or ``none`` for a single process."""
        return "none" if self.process_group is None else dist.get_backend(self.process_group)

    def gather_numbers(self, values: Sequence[float | torch.Tensor]) -> list[list[float]]:
        """Exchange a few numbers: every rank gets every rank's, as float64, in rank order.

        It waits for the slowest rank and, on CUDA, for the device, once: not for use inside a pass.

        Args:
            values: Numbers, or scalars on the group's device, which need not be read by the host before.
        """
        if self.size == 1:
            return [[float(value) for value in values]]
        known = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
        mine = torch.tensor(known, dtype=torch.float64).to(self.device, non_blocking=True)
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                mine[index].copy_(value)
        everyone = torch.empty(self.size * len(values), dtype=torch.float64, device=self.device)
        guard = guard_of(self.process_group)
        if guard is None:
            dist.all_gather_single(everyone, mine, group=self.process_group)
        else:
            number = guard.enter(CollectiveKind.ALL_GATHER, "numbers", (), everyone.numel())
            work = dist.all_gather_single(everyone, mine, group=self.process_group, async_op=True)
            assert work is not None
            guard.wait(waited_on_host(work, self.device), number)
        return everyone.view(self.size, len(values)).tolist()

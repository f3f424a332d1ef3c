"""The most bytes that an allocator held, interval by interval.

On CUDA the caching allocator keeps a peak that can begin anew. On CPU torch's allocator keeps none, so the
allocations that torch's profiler sees are added up: those of every torch operation on the thread that runs the step
and on torch's own threads, but not the frees of what was allocated before it began, which count as still there.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "zerotune::mark"


class AllocationRecorder(Protocol):
    """Records what is allocated from :meth:`start` to :meth:`stop`."""

    def start(self) -> None: ...

    def mark(self) -> None:
        """An interval ends and the next begins."""

    def stop(self) -> list[int]:
        """The most bytes held in each interval, one more than there were marks."""


def allocation_recorder(device: torch.device, at_rest: int) -> AllocationRecorder:
    """A recorder of all bytes held on a device.

    Args:
        device: Where.
        at_rest: Bytes held when it starts; CUDA's allocator knows them itself.
    """
    return CudaAllocations(device) if device.type == "cuda" else CpuAllocations(at_rest)


class CpuAllocations:
    """The running sum of allocations, on top of what was held before.

    Args:
        at_rest: Bytes held when it starts.
    """

    def __init__(self, at_rest: int = 0) -> None:
        self._at_rest = at_rest
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        self._profiler.start()

    def mark(self) -> None:
        with record_function(_MARK):
            pass

    def stop(self) -> list[int]:
        self._profiler.stop()
        changes: list[tuple[int, int | None]] = []  # time, and bytes or a mark
        for event in self._profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == _MARK:
                changes.append((event.start_ns(), None))
            elif event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
                changes.append((event.start_ns(), event.nbytes()))  # type: ignore[union-attr]
        held = self._at_rest
        peaks = [held]
        for _, nbytes in sorted(changes, key=lambda change: change[0]):
            if nbytes is None:
                peaks.append(held)
            else:
                held += nbytes
                peaks[-1] = max(peaks[-1], held)
        return peaks


class CudaAllocations:
    """The caching allocator's own peaks, with what it holds back beyond them. Its peak statistics begin anew.

    Args:
        device: Whose allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: list[int] = []

    def start(self) -> None:
        self._peaks.clear()
        torch.cuda.reset_peak_memory_stats(self._device)

    def mark(self) -> None:
        self._peaks.append(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> list[int]:
        self.mark()
        held_back = max(torch.cuda.memory_reserved(self._device) - max(self._peaks), 0)
        return [peak + held_back for peak in self._peaks]

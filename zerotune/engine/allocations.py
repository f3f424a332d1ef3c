"""The most bytes that an allocator held, interval by interval.

On CUDA the caching allocator keeps a peak that can begin anew. On CPU torch's allocator keeps none, so the
allocations that torch's profiler sees are added up: those of every torch operation on the thread that runs the step
and on torch's own threads, but not the frees of what was allocated before it began, which count as still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "zerotune::mark"

Parents = tuple[tuple[int, str], ...]
"""Events around an event of a profile, the outermost first: number and name."""


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
        assert self._profiler.profiler is not None and self._profiler.profiler.kineto_results is not None
        tree = self._profiler.profiler.kineto_results.experimental_event_tree()
        held = self._at_rest
        peaks = [held]
        alive: dict[int, int] = {}
        for event in sorted((event for event, _ in walk(tree)), key=lambda event: event.start_time_ns):
            if event.name == _MARK:
                peaks.append(held)
            elif event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
                change = event.extra_fields
                # By address: the profiler also reports frees of what it saw allocated when it last ran.
                if change.alloc_size > 0:
                    held -= alive.pop(change.ptr, 0)  # it was freed, unseen, or nobody could have it again
                    alive[change.ptr] = change.alloc_size
                    held += change.alloc_size
                    peaks[-1] = max(peaks[-1], held)
                else:
                    held -= alive.pop(change.ptr, 0)
        return peaks


def walk(roots: Iterable[Any]) -> Iterator[tuple[Any, Parents]]:
    """Every event of a profile with those around it."""
    waiting: list[tuple[Any, Parents]] = [(root, ()) for root in reversed(list(roots))]
    while waiting:
        event, parents = waiting.pop()
        yield event, parents
        children = event.children
        if children:
            below = (*parents, (event.id, event.name))
            waiting += [(child, below) for child in reversed(children)]


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

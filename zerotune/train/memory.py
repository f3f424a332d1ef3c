"""Peak memory of one rank.

On CUDA the caching allocator keeps its own peaks. On CPU torch's allocator keeps none, so the peak is put together
from the bytes at rest and the largest running sum of the allocations of one untimed step (see
:mod:`zerotune.engine.allocations`). Frees of what was allocated before are not seen in it: an engine must therefore
empty its pools first.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from zerotune.engine.allocations import CpuAllocations
from zerotune.engine.group import RankGroup
from zerotune.records import MemoryUse
from zerotune.train.engines import TunedEngine

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def allocation_peak(function: Callable[[], object]) -> int:
    """Call ``function`` and return the most bytes of CPU tensors that were alive at once and allocated within."""
    recorder = CpuAllocations()
    recorder.start()
    try:
        function()
    finally:
        peaks = recorder.stop()
    return max(peaks)


def steady_peak(step: Callable[[], object]) -> int:
    """The lesser :func:`allocation_peak` of two steps, which must leave nothing in pools: garbage in cycles, or a free that the
    profiler missed, swells one."""
    return min(allocation_peak(step) for _ in range(2))


def reset_peaks(device: torch.device) -> None:
    """Begin a new peak: of CUDA's allocator, and of the process's resident set where the kernel allows it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")  # Linux: sets the peak to the current resident set


def resident_peak() -> int:
    """Largest resident set of this process, bytes: since :func:`reset_peaks` on Linux, else since it began."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def bytes_in_use(device: torch.device) -> int:
    """Bytes in use now: allocated on the device, or on CPU the resident set."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def memory_use(engine: TunedEngine, device: torch.device, step_peak: Callable[[], int] | None) -> MemoryUse:
    """This rank's memory.

    Args:
        engine: Whose bytes at rest are asked for.
        device: Where it runs.
        step_peak: Takes one optimizer step, untimed, and returns the most bytes that it had allocated at once (see
            :func:`allocation_peak`); called on CPU. Without it the peak on CPU is the resident one, which includes
            Python and torch.
    """
    engine.flush()
    live = engine.peak_live_elements
    at_rest = sum(engine.at_rest().values())
    resident = resident_peak()
    if device.type == "cuda":
        peak, peak_allocated = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
    elif step_peak is not None:
        peak = peak_allocated = at_rest + step_peak()
    else:
        peak = peak_allocated = resident
    return MemoryUse(
        peak=peak,
        peak_allocated=peak_allocated,
        at_rest=at_rest,
        resident_peak=resident,
        peak_live_elements=max(live, engine.peak_live_elements),
    )


def of_all_ranks(mine: MemoryUse, group: RankGroup) -> list[MemoryUse]:
    """Every rank's memory, in rank order; collective."""
    names = list(MemoryUse.model_fields)
    rows = group.gather_numbers([float(getattr(mine, name)) for name in names])
    return [MemoryUse(**{name: int(value) for name, value in zip(names, row, strict=True)}) for row in rows]


def release_memory() -> None:
    """Give back what dead objects held, to the device and to the system, so that the next run starts flat."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed pages otherwise

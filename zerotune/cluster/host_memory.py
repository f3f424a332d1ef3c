"""What a rank's allocator does with memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_THRESHOLD = 32 * 2**20
"""glibc takes no larger one."""

_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let the process keep what it frees, and use it again, but for blocks of more than 32 MiB.

    By default glibc gives large blocks back to the system at once, and every page of the next one costs a fault: 9 000 to
    17 000 a step, 25 to 35 ms of 750, in the 10.5 M model of ``examples/bench.yaml`` under every engine. Nothing happens
    where the allocator is another one.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)

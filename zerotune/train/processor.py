"""Processor time of this process, of all its threads: what a step costs a core, whatever it waits for besides."""

from __future__ import annotations

import resource
import statistics
from dataclasses import dataclass

from zerotune.engine.group import RankGroup


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds of processor time.

    Attributes:
        program: In code of the process: torch, Python, and what spins.
        kernel: In the kernel on its behalf: sockets, page faults.
    """

    program: float = 0.0
    kernel: float = 0.0

    @classmethod
    def so_far(cls) -> ProcessorTime:
        """Since the process began."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(usage.ru_utime, usage.ru_stime)

    def __add__(self, other: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(self.program + other.program, self.kernel + other.kernel)

    def __sub__(self, other: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(self.program - other.program, self.kernel - other.kernel)

    def per_step(self, steps: int, group: RankGroup) -> ProcessorTime:
        """Of one of the steps that it was spent in, the mean over ranks; collective."""
        program, kernel = zip(*group.gather_numbers([self.program, self.kernel]), strict=True)
        return ProcessorTime(statistics.fmean(program) / steps, statistics.fmean(kernel) / steps)

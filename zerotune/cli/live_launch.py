"""What is shown while a launch trains: a bar with the figures on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zerotune.report.format import memory

if TYPE_CHECKING:
    from zerotune.records import RunRecord
    from zerotune.train.context import Progress as RankProgress

_LINE_EVERY_S = 5.0


class LaunchView(Protocol):
    """Shows a training on stderr."""

    def started(self, run: RunRecord) -> None:
        """The run is in the store."""

    def show(self, progress: RankProgress) -> None:
        """Rank 0 is here."""


def launch_view(console: Console, steps: int) -> AbstractContextManager[LaunchView]:
    """A bar on a terminal, plain lines elsewhere."""
    return LiveLaunch(console, steps) if console.is_terminal else nullcontext(PlainLaunch(console))


def figures(progress: RankProgress) -> str:
    """``loss 2.3456  4,123 tokens/s  512.3 MiB``."""
    words = []
    if progress.loss is not None:
        words.append(f"loss {progress.loss:.4f}")
    if progress.tokens_per_second is not None:
        words.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.memory_bytes is not None:
        words.append(memory(progress.memory_bytes))
    return "  ".join(words)


class PlainLaunch:
    """One line per phase, and one every few seconds of training."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._last = 0.0

    def started(self, run: RunRecord) -> None:
        self._line(f"run {run.run_id}, logs in {run.run_dir}")

    def show(self, progress: RankProgress) -> None:
        now = time.monotonic()
        is_new, is_last = progress.phase != self._phase, progress.step == progress.steps
        if not (is_new or is_last or now - self._last >= _LINE_EVERY_S):
            return
        self._phase, self._last = progress.phase, now
        steps = f"/{progress.steps}" if progress.steps is not None else ""
        where = f" {progress.step}{steps}" if progress.step or progress.steps else ""
        self._line(f"{progress.phase}{where}  {figures(progress)}".rstrip())

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class LiveLaunch:
    """A progress bar with loss, speed and memory beside it."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=steps, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, run: RunRecord) -> None:
        self._console.print(f"run {run.run_id}, logs in {run.run_dir}", markup=False, soft_wrap=True)

    def show(self, progress: RankProgress) -> None:
        self._progress.update(self._task, description=progress.phase, figures=figures(progress))
        if progress.phase == "train":
            self._progress.update(self._task, completed=progress.step)

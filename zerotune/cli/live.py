"""What is shown while a search or a launch runs: a live table on a terminal, one line per trial elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from zerotune.records import RunRecord, Status
from zerotune.records.events import (
    ConfirmationProgress,
    Event,
    Notice,
    SearchFinished,
    SearchStarted,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from zerotune.report.format import duration, eta, memory

_ROWS = 12
"""Finished trials that the live table shows at most: the latest ones, as many as there is room for."""


class SearchView(Protocol):
    """Shows the events of a search on stderr."""

    def show(self, event: Event) -> None:
        """Show one event."""


def search_view(console: Console) -> AbstractContextManager[SearchView]:
    """A live table on a terminal, plain lines elsewhere."""
    return LiveSearch(console) if console.is_terminal else nullcontext(PlainSearch())


def knobs(changes: dict[str, str]) -> str:
    """The knobs that differ from the baseline, on one line."""
    return " ".join(f"{name}={value}" for name, value in changes.items()) or "defaults"


def outcome(run: RunRecord) -> str:
    """What became of a trial, in a few words."""
    if run.status is Status.COMPLETE:
        if run.feasible is False:
            return "over budget"
        measured = run.measurement
        return "slow, cut short" if measured and measured.stopped_because == "cannot_win" else "ok"
    phase = f" at {run.failure.phase}" if run.failure and run.failure.phase else ""
    return run.status.value.replace("_", " ") + phase


def started_line(event: SearchStarted) -> str:
    """What a search is about to do."""
    budget = f", at most {memory(event.memory_budget)} per rank" if event.memory_budget is not None else ""
    time = f", at most {duration(event.time_budget)}" if event.time_budget is not None else ""
    before = f"; {event.finished} of them finished earlier" if event.finished else ""
    return (
        f"study {event.study}: {event.trials} trials of space {event.space} on {event.ranks} ranks,"
        f" objective {event.objective}{budget}{time}{before}"
    )


class PlainSearch:
    """One line per trial, no control codes."""

    def __init__(self) -> None:
        self._round = 0

    def show(self, event: Event) -> None:
        match event:
            case Notice():
                self._line(event.message)
            case SearchStarted():
                self._line(started_line(event))
            case TrialFinished():
                self._line(self._finished(event))
            case ConfirmationProgress() if event.round != self._round:
                self._round = event.round
                left = f", {eta(event.eta_seconds)}" if event.eta_seconds else ""
                self._line(f"confirming in turns: round {event.round} of {event.rounds}{left}")

    def _finished(self, event: TrialFinished) -> str:
        run = event.run
        figures = ""
        if run.measurement is not None:
            rate = run.measurement.tokens_per_second.value
            figures = f"  {rate:,.0f} tok/s  {memory(run.measurement.peak_memory_bytes)}"
        left = f"  ({eta(event.eta_seconds)})" if event.eta_seconds is not None else ""
        return f"[{event.finished}/{event.trials}] {run.run_id} {outcome(run)}{figures}  {knobs(event.changes)}{left}"

    def _line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class LiveSearch:
    """A table that grows, the running trial and the budget below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._finished: list[TrialFinished] = []
        self._started: SearchStarted | None = None
        self._running: TrialStarted | None = None
        self._progress: TrialProgress | None = None
        self._confirming: ConfirmationProgress | None = None
        self._end: float | None = None
        self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, event: Event) -> None:
        match event:
            case Notice():
                self._console.print(Text(event.message, style="dim"))
            case SearchStarted():
                self._started = event
                self._console.print(started_line(event), highlight=False)
            case TrialStarted():
                self._running, self._progress = event, None
            case TrialProgress():
                self._progress = event
            case TrialFinished():
                self._finished.append(event)
                self._expect(event.eta_seconds)
                self._running = self._progress = None
            case ConfirmationProgress():
                self._confirming = event
                self._expect(event.eta_seconds)
            case SearchFinished():
                self._confirming = None

    def _expect(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def _eta(self) -> str:
        """Counts down between events; an expectation that is overrun says nothing."""
        left = None if self._end is None else self._end - time.monotonic()
        return eta(left) if left is None or left > 0 else ""

    # ----------------------------------------------------------------------------------------------- rendering

    def _render(self) -> RenderableType:
        below = Group(self._bar(), self._best(), self._now())
        # Rich cuts at the bottom what is higher than the screen, and there is what matters most.
        room = self._console.height - self._height(below) - 1
        rows = min(_ROWS, len(self._finished))
        while rows > 0 and self._height(self._table(rows)) > room:
            rows -= 1
        return Group(self._table(rows), below) if rows else below

    def _height(self, part: RenderableType) -> int:
        return len(self._console.render_lines(part))

    def _table(self, rows: int) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("#", "tok/s", "peak"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("outcome", no_wrap=True)
        table.add_column("knobs that differ from the baseline", overflow="fold")
        for event in self._finished[-rows:]:
            run, measured = event.run, event.run.measurement
            is_best = event.run.run_id == getattr(self._finished[-1].best, "run_id", None)
            table.add_row(
                str(run.trial_number),
                f"{measured.tokens_per_second.value:,.0f}" if measured else "",
                memory(measured.peak_memory_bytes) if measured else "",
                outcome(run),
                knobs(event.changes),
                style="bold green" if is_best else "" if outcome(run) == "ok" else "dim",
            )
        return table

    def _bar(self) -> RenderableType:
        if self._started is None:
            return Text("")
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[eta]}"),
        )
        if self._confirming is not None:
            done, total = self._confirming.done, self._confirming.total
            bar.add_task("confirming in turns", completed=done, total=total, eta=self._eta())
        else:
            last = self._finished[-1] if self._finished else None
            done = last.finished if last else self._started.finished
            bar.add_task("trials", completed=done, total=self._started.trials, eta=self._eta())
        return bar

    def _best(self) -> Text:
        best = self._finished[-1].best if self._finished else None
        if best is None or best.measurement is None:
            return Text("no feasible trial yet", style="dim")
        rate = best.measurement.tokens_per_second.value
        text = f"best so far: trial {best.trial_number}, {rate:,.0f} tok/s, {memory(best.measurement.peak_memory_bytes)}"
        baseline = self._finished[-1].baseline
        if best.is_baseline:
            text += ", the defaults"
        elif baseline is not None and baseline.measurement is not None:
            text += f", {rate / baseline.measurement.tokens_per_second.value:.2f}x the baseline (unconfirmed)"
        return Text(text)

    def _now(self) -> Text:
        if self._confirming is not None:
            turn = self._confirming
            return Text(f"round {turn.round} of {turn.rounds}: trial {turn.trial_number}", style="cyan")
        if self._running is None:
            return Text("")
        text = f"trial {self._running.number} ({self._running.source}): {knobs(self._running.changes)}"
        now = self._progress
        if now is None:
            text += "  starting"
        else:
            steps = f" {now.step}/{now.steps}" if now.steps else ""
            text += f"  {now.phase}{steps}"
            if now.tokens_per_second is not None:
                text += f"  {now.tokens_per_second:,.0f} tok/s"
        return Text(text, style="cyan")

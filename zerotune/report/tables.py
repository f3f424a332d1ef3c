"""Tables of runs, from records alone: the same at the end of a search and from ``zerotune results``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from zerotune.config.knobs import named_changes
from zerotune.records import RunKind, RunRecord, Status, StudyRecord
from zerotune.records.bench import BenchReport
from zerotune.report import format
from zerotune.report.differences import Difference
from zerotune.report.printing import Sheet
from zerotune.report.ranking import Row, choose, rank_rows
from zerotune.store.query import Sort


def ranked_table(
    runs: Iterable[RunRecord],
    baseline: RunRecord | None = None,
    *,
    studies: Iterable[StudyRecord] = (),
    sort: Sort = "throughput",
    top: int | None = None,
    pareto: bool = False,
    title: str | None = None,
) -> Table:
    """The ranked trials of one workload on one cluster. Print it with :func:`zerotune.report.printing.print_whole`.

    Args:
        runs: Of one workload and cluster; confirmations among them are counted, not listed.
        baseline: For runs outside any study; each study has its own.
        studies: Their studies, for winners and paired speed-ups.
        sort: What the ranking is by.
        top: So many rows at most.
        pareto: Only the front of throughput and peak memory.
        title: Heading.

    Raises:
        ValueError: The runs are of several workloads or clusters.
    """
    rows = rank_rows(runs, studies, sort, baseline)
    return table_of_ranked(choose(rows, top, pareto), title)


def table_of_ranked(rows: Sequence[Row], title: str | None = None) -> Table:
    """A table of ranked rows."""
    in_turns = any(row.confirmed for row in rows)
    table = _table(title, dispensable=("step ms", "trial", "95 %"))
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("run", no_wrap=True)
    with_study = len({row.run.study for row in rows}) > 1
    if with_study:
        table.add_column("study", no_wrap=True)
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("95 %", no_wrap=True)
    table.add_column("step ms", justify="right", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    table.add_column(
        "vs baseline" if _all_vs_baseline(rows) else "vs reference", justify="right", no_wrap=True
    )
    if in_turns:
        table.add_column("measured", no_wrap=True)
    table.add_column("differs from the baseline in", overflow="fold")
    for row in rows:
        measured, rate, step_time = row.run.measurement, row.tokens_per_second, row.step_time_s
        assert measured is not None and rate is not None and step_time is not None, "else it has no rank"
        cells = [
            format.number(row.rank),
            row.run.run_id,
            *([row.run.study or format.MISSING] if with_study else []),
            format.number(row.run.trial_number),
            format.number(rate.value),
            format.bounds(rate),
            format.milliseconds(step_time.value),
            format.memory(measured.peak_memory_bytes),
            _speed(row),
            *(["in turns" if row.confirmed else "once"] if in_turns else []),
            _remarks(row),
        ]
        table.add_row(*[Text(cell) for cell in cells], style="bold" if row.is_winner else None)
    table.caption = _caption(rows)
    table.caption_justify = "left"
    return table


def table_of_left_out(rows: Sequence[Row]) -> Table | None:
    """The trials that are not ranked, with the reason; ``None`` if there are none."""
    rows = [row for row in rows if row.rank is None and row.run.kind is RunKind.TRIAL]
    if not rows:
        return None
    table = _table(f"not ranked: {outcomes([row.run for row in rows])}", dispensable=("trial",))
    table.add_column("run", no_wrap=True)
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    table.add_column("differs from the baseline in", overflow="fold")
    for row in rows:
        measured = row.run.measurement
        cells = [
            row.run.run_id,
            format.number(row.run.trial_number),
            row.run.status.value,
            format.number(measured.tokens_per_second.value if measured else None),
            format.memory(measured.peak_memory_bytes if measured else None),
            reason(row.run),
            _remarks(row),
        ]
        table.add_row(*[Text(cell) for cell in cells])
    return table


def table_of_launches(rows: Sequence[Row]) -> Table | None:
    """The launches among the rows; ``None`` if there are none."""
    runs = [row.run for row in rows if row.run.kind is RunKind.LAUNCH]
    if not runs:
        return None
    table = _table("launches", dispensable=("started (UTC)", "peak memory"))
    table.add_column("run", no_wrap=True)
    table.add_column("started (UTC)", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("final loss", justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    table.add_column("checkpoint or reason", overflow="fold")
    for run in runs:
        measured = run.measurement
        cells = [
            run.run_id,
            f"{run.created:%Y-%m-%d %H:%M}",
            run.status.value,
            format.number(run.steps_done),
            f"{measured.final_loss:.4f}" if measured else format.MISSING,
            format.number(measured.tokens_per_second.value if measured else None),
            format.memory(measured.peak_memory_bytes if measured else None),
            run.checkpoint or reason(run),
        ]
        table.add_row(*[Text(cell) for cell in cells])
    return table


def table_of_benches(rows: Sequence[Row]) -> Table | None:
    """The benchmarks among the rows; ``None`` if there are none."""
    runs = [row.run for row in rows if row.run.kind is RunKind.BENCH]
    if not runs:
        return None
    table = _table(
        "benchmarks: step time over that of another engine, in turns", dispensable=("started (UTC)",)
    )
    table.add_column("run", no_wrap=True)
    table.add_column("started (UTC)", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("step ms", justify="right", no_wrap=True)
    table.add_column("over the others, or reason", overflow="fold")
    for run in runs:
        report = run.bench
        cells = [
            run.run_id,
            f"{run.created:%Y-%m-%d %H:%M}",
            run.status.value,
            f"{report.engines[0].step_time_s.value * 1e3:.1f}" if report else format.MISSING,
            _ratios(report) if report else reason(run),
        ]
        table.add_row(*[Text(cell) for cell in cells])
    return table


def _ratios(report: BenchReport) -> str:
    """``ddp 0.96, fsdp2 0.74``."""
    ours = report.engines[0].name
    others = ((row.name, report.ratios.get(f"{ours}/{row.name}")) for row in report.engines)
    return ", ".join(f"{name} {ratio.value:.2f}" for name, ratio in others if ratio is not None)


def outcomes(runs: Iterable[RunRecord]) -> str:
    """How many ended in which way: ``3 oom_device, 2 over the memory budget``."""
    counts = Counter(_outcome(run) for run in runs)
    return ", ".join(f"{amount} {name}" for name, amount in counts.most_common())


def reason(run: RunRecord) -> str:
    """Why a run is not ranked, in one line; empty if nothing speaks against it."""
    if run.failure is not None:
        rank = f"rank {run.failure.rank}" if run.failure.rank is not None else ""
        phase = f"in {run.failure.phase}" if run.failure.phase else ""
        place = " ".join(word for word in (rank, phase) if word)
        return f"{place}: {run.failure.message}" if place else run.failure.message
    if run.feasible is False:
        budget = f" of {format.memory(run.memory_budget)}" if run.memory_budget is not None else ""
        return f"over the memory budget{budget}"
    return ""


def changes_text(changes: Iterable[Difference]) -> str:
    """``prefetch_distance=0 release=keep``."""
    named = named_changes({change.name: change.after for change in changes})
    return " ".join(f"{name}={format.setting(value)}" for name, value in named.items())


def _table(title: str | None, dispensable: Sequence[str] = ()) -> Sheet:
    return Sheet(
        dispensable=dispensable,
        title=Text(title) if title else None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=SIMPLE_HEAD,
    )


def _outcome(run: RunRecord) -> str:
    if run.status is Status.COMPLETE:
        return "over the memory budget" if run.feasible is False else "complete"
    return run.status.value


def _remarks(row: Row) -> str:
    marks = {
        "winner": row.is_winner,
        "the baseline": row.run.is_baseline,
        "on the Pareto front": row.pareto,
    }
    notes = [f"({', '.join(name for name, holds in marks.items() if holds)})"] if any(marks.values()) else []
    if row.changes:
        notes.append(changes_text(row.changes))
    measured = row.run.measurement
    if row.rank is not None and measured is not None and row.confirmed is None:
        if measured.stopped_because == "cannot_win":
            notes.append("(cut short)")
        elif measured.is_noisy:
            notes.append("(noisy)")
    return " ".join(notes)


def _speed(row: Row) -> str:
    if row.reference is not None and row.reference.run_id == row.run.run_id:
        return "baseline" if row.run.is_baseline else "reference"
    return format.change(row.speedup)


def _all_vs_baseline(rows: Iterable[Row]) -> bool:
    return all(row.reference is None or row.reference.is_baseline for row in rows)


def _caption(rows: Sequence[Row]) -> Text | None:
    lines = []
    base = "baseline" if _all_vs_baseline(rows) else "reference"
    if turns := sorted({row.confirmed.rounds for row in rows if row.confirmed}):
        rounds = " or ".join(str(number) for number in turns)
        lines.append(
            f"in turns: measured again side by side in {rounds} rounds, of which tokens/s is the median;"
            f" vs {base} is the ratio within the rounds"
        )
        if not all(row.confirmed for row in rows):
            lines.append(
                f"once: the trial alone, not among the best few; vs {base} compares measurements minutes apart"
            )
    if any(row.pareto for row in rows):
        lines.append("Pareto front: no other run is faster with no more memory")
    if any(row.is_tied for row in rows):
        lines.append(
            "runs whose intervals overlap with the fastest of them are a tie, ordered by peak memory"
        )
    others = {row.reference.run_id for row in rows if row.reference and not row.reference.is_baseline}
    if others:
        lines.append(f"no feasible baseline: speeds are relative to {', '.join(sorted(others))}")
    for name in sorted({name for row in rows for name in row.run.versions}):
        versions = sorted({row.run.versions.get(name, "unknown") for row in rows})
        if len(versions) > 1:
            lines.append(f"note: measured with different versions of {name}: {', '.join(versions)}")
    return Text("\n".join(lines)) if lines else None

"""One run in full, and two beside each other, for reading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from zerotune.config.knobs import AUTO, REGISTRY
from zerotune.config.schema import knob_default
from zerotune.records import Failure, Fingerprint, Ledger, Measurement, RunKind, RunRecord
from zerotune.report import format
from zerotune.report.comparison import Comparison, Figure
from zerotune.report.differences import knob_values
from zerotune.report.headline import headline
from zerotune.report.ledgers import LedgerSummary, summarise


def describe_run(
    run: RunRecord, ledgers: Sequence[Ledger] = (), baseline: RunRecord | None = None
) -> list[Table | Text]:
    """Everything the store knows of a run: how it ended, its configuration, what was measured, its ledger.

    Args:
        run: The run.
        ledgers: Of one of its steady steps, one per rank.
        baseline: The baseline of its study, whose knobs stand beside the run's.
    """
    summary = summarise(ledgers)
    parts: list[Table | Text | None] = [
        _overview(run),
        _failure(run.failure) if run.failure else None,
        _measurement(run.measurement) if run.measurement else None,
        _knobs(run, baseline),
        *(_ledger(summary) if summary else []),
        _facts("workload", run.workload),
        _facts("cluster", run.cluster),
    ]
    return [part for part in parts if part is not None]


def describe_comparison(comparison: Comparison) -> list[Table | Text]:
    """In what two runs differ, what was measured of both, and what it comes to."""
    names = (comparison.first.run_id, comparison.second.run_id)
    parts: list[Table | Text | None] = [
        _pairs("configuration", names, [(each.path, each.before, each.after) for each in comparison.config]),
        _pairs("workload", names, _flat_pairs(comparison.workload)),
        _pairs("cluster", names, _flat_pairs(comparison.cluster)),
        _pairs("versions", names, _flat_pairs(comparison.versions)),
        _figures(names, comparison.figures),
        *(Text(f"note: {note}") for note in comparison.notes),
        _verdict(comparison),
    ]
    return [part for part in parts if part is not None]


# ------------------------------------------------------------------------------------------------- parts of one run


def _overview(run: RunRecord) -> Table:
    budget = f" (budget {format.memory(run.memory_budget)})" if run.memory_budget is not None else ""
    fits = {None: "not judged", True: "yes", False: "no"}[run.feasible] + budget
    trial = f"{run.study or format.MISSING}, trial {format.number(run.trial_number)}"
    rows = [
        ("what", headline(run)),
        ("status", run.status.value),
        ("kind", run.kind.value + (", the baseline" if run.is_baseline else "")),
        ("study", trial if run.study else None),
        ("fits", fits),
        ("steps", None if run.kind is RunKind.BENCH else format.number(run.steps_done)),
        ("started", f"{run.created:%Y-%m-%d %H:%M:%S} UTC"),
        ("took", format.duration((run.ended - run.created).total_seconds()) if run.ended else None),
        ("checkpoint", run.checkpoint),
        ("files", run.run_dir),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items()) or None),
    ]
    return _listing(f"run {run.run_id}", rows)


def _failure(failure: Failure) -> Table:
    rank = format.MISSING if failure.rank is None else str(failure.rank)
    rows = [
        ("message", failure.message),
        ("where", f"rank {rank}" + (f" on {failure.node}" if failure.node else "")),
        ("phase", failure.phase),
        ("log", failure.log_path),
        ("remedy", failure.remedy),
        ("traceback", failure.traceback),
    ]
    return _listing("failure", rows)


def _measurement(measured: Measurement) -> Table:
    memory = measured.memory
    because = {
        "interval": "the interval became narrow enough",
        "cannot_win": "it could not win any more",
        "budget": "the steps were spent: noisy",
    }[measured.stopped_because]
    steps = f"{len(measured.step_times_s)} steady after {measured.warmup_steps} of warm-up; stopped because {because}"
    ms = [format.milliseconds(x) for x in (measured.step_time_s.low, measured.step_time_s.high)]
    step = f"{format.milliseconds(measured.step_time_s.value)} ms [{ms[0]}, {ms[1]}], slowest rank"
    rows = [
        ("tokens/s", format.number_interval(measured.tokens_per_second)),
        ("step time", step),
        ("steps", steps),
        ("tokens a step", format.number(measured.tokens_per_step)),
        ("peak memory", ", ".join(format.memory(use.peak) for use in memory) + " by rank"),
        ("at rest", ", ".join(format.memory(use.at_rest) for use in memory) + " by rank"),
        ("resident peak", ", ".join(format.memory(use.resident_peak) for use in memory) + " by rank"),
        ("peak live", f"{format.number(max(use.peak_live_elements for use in memory))} elements"),
        ("sent a step", f"{format.number(measured.sent_elements_per_step)} elements a rank"),
        ("collectives", f"{format.number(measured.collectives_per_step)} a step"),
        ("final loss", f"{measured.final_loss:.6g}"),
        ("start-up", format.duration(measured.startup_s)),
    ]
    return _listing("measured, with 95 % intervals", rows)


def _knobs(run: RunRecord, baseline: RunRecord | None) -> Table:
    """The knobs, marked where they are not the default: that of this model, where the baseline tells it."""
    defaults = knob_values(baseline.config) if baseline else _fixed_defaults()
    table = _table("configuration")
    table.add_column("knob", no_wrap=True)
    table.add_column("value", no_wrap=True, justify="right")
    if baseline:
        table.add_column("baseline", no_wrap=True, justify="right")
    table.add_column("unit", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("", no_wrap=True)
    for (path, value), info in zip(knob_values(run.config).items(), REGISTRY.values(), strict=True):
        changed = path in defaults and value != defaults[path]
        cells = [
            path,
            format.setting(value),
            *([format.setting(defaults[path])] if baseline else []),
            info.unit,
            info.default,
            "changed" if changed else "",
        ]
        table.add_row(*[Text(cell) for cell in cells], style="bold" if changed else None)
    return table


def _fixed_defaults() -> dict[str, Any]:
    """Defaults that do not depend on the model; what ``auto`` became cannot be told from a number given."""
    defaults = {name: knob_default(name) for name in REGISTRY if name != "micro_batch_size"}
    return {REGISTRY[name].path: value for name, value in defaults.items() if value != AUTO}


def _ledger(summary: LedgerSummary) -> list[Table]:
    moved = _table(
        f"one steady step: collectives of a rank, the slowest of {format.count(summary.ranks, 'rank')}"
    )
    moved.add_column("collective", no_wrap=True)
    moved.add_column("purpose", no_wrap=True)
    for name in ("count", "elements", "sent", "exposed ms"):
        moved.add_column(name, no_wrap=True, justify="right")
    for each in summary.collectives:
        cells = [
            each.kind.value,
            each.purpose,
            format.number(each.count),
            format.number(each.elements),
            format.sent(each.sent_bytes, each.left_out_bytes),
            format.milliseconds(each.exposed_s),
        ]
        moved.add_row(*[Text(cell) for cell in cells])
    alive = _table(
        f"one steady step: bytes of a rank; peak live {format.number(summary.peak_live_elements)} elements"
    )
    alive.add_column("class", no_wrap=True)
    alive.add_column("at rest", no_wrap=True, justify="right")
    alive.add_column("peak", no_wrap=True, justify="right")
    for name, peak in summary.peak.items():
        cells = [name.value, format.memory(summary.at_rest.get(name, 0)), format.memory(peak)]
        alive.add_row(*[Text(cell) for cell in cells])
    return [moved, alive]


def _facts(what: str, fingerprint: Fingerprint) -> Table:
    return _listing(
        f"{what} {fingerprint.key}", [(name, _short(value)) for name, value in fingerprint.facts.items()]
    )


# ----------------------------------------------------------------------------------------------- parts of a comparison


def _pairs(title: str, names: tuple[str, str], pairs: Iterable[tuple[str, Any, Any]]) -> Table | None:
    pairs = list(pairs)
    if not pairs:
        return None
    table = _table(f"{title}: what differs")
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for path, before, after in pairs:
        table.add_row(Text(path), Text(_short(before)), Text(_short(after)))
    return table


def _figures(names: tuple[str, str], figures: Sequence[Figure]) -> Table:
    table = _table("measured")
    table.add_column("", no_wrap=True)
    for name in (*names, "second over first [95 %]"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in figures:
        ratio = each.ratio
        exact = ratio is not None and ratio.low == ratio.high
        text = format.MISSING if ratio is None else f"{ratio.value:.3f}x" if exact else format.factor(ratio)
        label, first, second = _figure_cells(each)
        table.add_row(Text(label), Text(first), Text(second), Text(text))
    return table


def _figure_cells(figure: Figure) -> tuple[str, str, str]:
    label, show = {
        "tokens_per_second": ("tokens/s", format.number),
        "step_time_s": ("step ms", format.milliseconds),
        "peak_memory_bytes": ("peak memory", format.memory),
        "final_loss": ("final loss", lambda x: format.MISSING if x is None else f"{x:.6g}"),
        "collectives_per_step": ("collectives a step", format.number),
        "sent_elements_per_step": ("elements sent a step", format.number),
    }[figure.name]
    return label, show(figure.first), show(figure.second)


def _verdict(comparison: Comparison) -> Text | None:
    ratio = comparison.throughput
    if not comparison.is_comparable or ratio is None:
        return None
    if comparison.faster is None:
        return Text(
            f"a tie: the difference in throughput, {format.change(ratio).removesuffix(' tie')}, is noise"
        )
    change = format.change(ratio)
    return Text(f"{comparison.faster.run_id} is faster: throughput of the second over the first is {change}")


def _flat_pairs(pairs: dict[str, tuple[Any, Any]]) -> list[tuple[str, Any, Any]]:
    """Facts that are sections of a configuration, down to the values that differ."""
    flat: list[tuple[str, Any, Any]] = []
    for name, (before, after) in pairs.items():
        if isinstance(before, dict) and isinstance(after, dict):
            inner = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
            differing = {f"{name}.{key}": pair for key, pair in inner.items() if pair[0] != pair[1]}
            flat += _flat_pairs(differing)
        else:
            flat.append((name, before, after))
    return flat


# ------------------------------------------------------------------------------------------------------------- layout


def _listing(title: str, rows: Iterable[tuple[str, str | None]]) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value is not None:
            table.add_row(Text(name), Text(value))
    return table


def _table(title: str) -> Table:
    return Table(
        title=Text(title), title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD
    )


def _short(value: Any) -> str:
    """A fact on one line: without the parts of a section that are not set."""
    if isinstance(value, dict):
        inside = ", ".join(f"{key}: {_short(child)}" for key, child in value.items() if child is not None)
        return f"{{{inside}}}"
    return format.setting(value)

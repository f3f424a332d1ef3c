"""A benchmark as a table, as JSON and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Column
from rich.text import Text

from zerotune.records import Interval
from zerotune.records.bench import BenchReport, EngineFigures
from zerotune.report.format import memory
from zerotune.report.printing import Sheet


def bench_table(report: BenchReport) -> Sheet:
    """One row per engine: step time, memory, and the paired ratios of ours to it."""
    ours = report.engines[0].name
    figure: dict[str, Any] = {"justify": "right", "no_wrap": True}
    table = Sheet(
        Column("engine", no_wrap=True),
        Column("step ms", **figure),
        Column("95 %", **figure),
        Column("program, kernel", **figure),
        Column("peak memory", **figure),
        Column("sent a step", **figure),
        Column("hidden, exposed", **figure),
        Column("limit ms", **figure),
        Column("over its limit", **figure),
        Column(f"{ours} / it", **figure),
        Column("loss", **figure),
        dispensable=("loss", "95 %", "limit ms"),
        box=None,
    )
    for row in report.engines:
        table.add_row(*_cells(row, report, ours))
    return table


def _cells(row: EngineFigures, report: BenchReport, ours: str) -> list[str]:
    own_limit, ratio = report.ratios.get(f"{row.name}/limit"), report.ratios.get(f"{ours}/{row.name}")
    time = row.step_time_s
    return [
        row.name,
        f"{time.value * 1e3:.1f}",
        f"[{time.low * 1e3:.1f}, {time.high * 1e3:.1f}]",
        f"{row.program_s * 1e3:.0f}, {row.kernel_s * 1e3:.0f}",
        "" if row.peak_memory_bytes is None else memory(row.peak_memory_bytes),
        memory(int(row.sent_bytes)) if row.sent_bytes else "",
        f"{row.hidden_s * 1e3:.0f}, {row.exposed_s * 1e3:.0f}" if row.flows else "",
        "" if row.limit_s is None or own_limit is None else f"{row.limit_s * 1e3:.1f}",
        "" if own_limit is None else _ratio(own_limit),
        "" if ratio is None else _ratio(ratio),
        f"{row.final_loss:.5f}" if own_limit is not None else "",
    ]


def _ratio(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def bench_lines(report: BenchReport) -> list[Text]:
    """What the figures are of."""
    rate = report.link_bytes_per_s
    return [
        Text(""),
        Text(
            f"{report.ranks} ranks, {report.backend}, {report.device}; {report.parameters:,} parameters; "
            f"{report.rounds} rounds of {report.steps_per_round} steps, engines in turns"
            + (f"; a rank can send {rate * 8e-9:.2f} Gbit/s" if rate else "")
        ),
        Text("ratios are paired within rounds, with their 95 % interval; below 1 ours is faster"),
        Text(
            "compute: the same step without communication; limit: the larger of compute and the bytes at that rate"
        ),
        Text(
            "program, kernel: ms of processor time of a step, all threads of a rank, the mean over ranks; on one core each, the "
            "rest is standing still"
        ),
        Text(
            "hidden, exposed: ms of collectives under way beside compute, summed; ms that one step stood still for them"
        ),
    ]


def bench_document(report: BenchReport) -> dict[str, Any]:
    """The keys that programs rely on."""
    return {
        "backend": report.backend,
        "device": report.device,
        "ranks": report.ranks,
        "parameters": report.parameters,
        "link_bytes_per_s": report.link_bytes_per_s,
        "rounds": report.rounds,
        "steps_per_round": report.steps_per_round,
        "engines": {
            row.name: {
                "step_time_s": row.step_time_s.value,
                "step_time_ci": [row.step_time_s.low, row.step_time_s.high],
                "round_times_s": row.round_times_s,
                "program_s": row.program_s,
                "kernel_s": row.kernel_s,
                "peak_memory_bytes": row.peak_memory_bytes,
                "sent_bytes": row.sent_bytes,
                "limit_s": row.limit_s,
                **_ledger_figures(row),
                **({"knobs": report.configs[row.name].knobs} if row.name in report.configs else {}),
                "final_loss": row.final_loss,
            }
            for row in report.engines
        },
        "ratios": {
            name: {"median": ratio.value, "low": ratio.low, "high": ratio.high}
            for name, ratio in report.ratios.items()
        },
    }


def _ledger_figures(row: EngineFigures) -> dict[str, Any]:
    """What the ledger of one step says of an engine of ours; nothing for others, which keep none."""
    if row.name.split(":")[0] != "zerotune":
        return {}
    return {
        "collectives": row.collectives,
        "hidden_s": row.hidden_s,
        "exposed_s": row.exposed_s,
        "peak_live_elements": row.peak_live_elements,
        "flows": {
            flow.purpose: {
                "count": flow.count,
                "sent_bytes": flow.sent_bytes,
                "left_out_bytes": flow.left_out_bytes,
                "hidden_s": flow.hidden_s,
                "exposed_s": flow.exposed_s,
            }
            for flow in row.flows
        },
    }


def write_plot(report: BenchReport, path: Path) -> None:
    """Step times of every engine with their intervals and limits, as one self-contained HTML file."""
    import plotly.graph_objects as go

    rows = report.engines
    times = [row.step_time_s.value * 1e3 for row in rows]
    figure = go.Figure()
    figure.add_bar(
        x=[row.name for row in rows],
        y=times,
        name="step time",
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [row.step_time_s.high * 1e3 - t for row, t in zip(rows, times, strict=True)],
            "arrayminus": [t - row.step_time_s.low * 1e3 for row, t in zip(rows, times, strict=True)],
        },
    )
    limits = [(row.name, row.limit_s * 1e3) for row in rows if row.limit_s is not None]
    figure.add_scatter(
        x=[name for name, _ in limits],
        y=[limit for _, limit in limits],
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 40},
        name="its own limit",
    )
    figure.update_layout(
        title=f"{report.ranks} ranks, {report.backend}, {report.device}, {report.parameters:,} parameters",
        yaxis_title="ms per step",
    )
    path.write_text(figure.to_html(include_plotlyjs=True), encoding="utf-8")

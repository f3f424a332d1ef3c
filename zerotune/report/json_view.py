"""The JSON documents that programs rely on. Keys are only ever added."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from zerotune.records import Confirmed, Fingerprint, Interval, Ledger, RunRecord
from zerotune.report.bench import bench_document
from zerotune.report.comparison import Comparison
from zerotune.report.ledgers import summarise
from zerotune.report.ranking import Row


def run_document(run: RunRecord) -> dict[str, Any]:
    """A run: what programs rely on first, and everything else that is known of it.

    Figures are numbers or ``null``, never NaN, which is not JSON.
    """
    measured = run.measurement
    return plain(
        {
            "run_id": run.run_id,
            "status": run.status.value,
            "tokens_per_second": measured.tokens_per_second.value if measured else None,
            "tokens_per_second_ci": _bounds(measured.tokens_per_second if measured else None),
            "step_time_s": measured.step_time_s.value if measured else None,
            "step_time_s_ci": _bounds(measured.step_time_s if measured else None),
            "peak_memory_bytes": measured.peak_memory_bytes if measured else None,
            "final_loss": measured.final_loss if measured else None,
            "steps": run.steps_done,
            "steady_steps": len(measured.step_times_s) if measured else None,
            "stopped_because": measured.stopped_because if measured else None,
            "checkpoint": run.checkpoint,
            "kind": run.kind.value,
            "study": run.study,
            "trial_number": run.trial_number,
            "is_baseline": run.is_baseline,
            "feasible": run.feasible,
            "memory_budget": run.memory_budget,
            "failure": run.failure.model_dump(mode="json") if run.failure else None,
            "created": run.created.isoformat(),
            "ended": run.ended.isoformat() if run.ended else None,
            "workload": _fingerprint(run.workload),
            "cluster": _fingerprint(run.cluster),
            "versions": run.versions,
            "run_dir": run.run_dir,
            "config": run.config.model_dump(mode="json"),
        }
    )


def row_document(row: Row) -> dict[str, Any]:
    """A run with its place in the ranking of its workload and cluster."""
    speedup = row.baseline_speedup
    return run_document(row.run) | plain(
        {
            "rank": row.rank,
            "is_tied": row.is_tied,
            "pareto": row.pareto,
            "is_winner": row.is_winner,
            "confirmations": row.confirmations,
            "speedup": speedup.value if speedup else None,
            "speedup_ci": _bounds(speedup),
            "speedup_is_paired": row.is_paired if speedup else None,
            "in_turns": _in_turns(row.confirmed) if row.confirmed else None,
            "changes": {change.path: change.after for change in row.changes},
        }
    )


def results_document(rows: Iterable[Row]) -> dict[str, Any]:
    """What ``zerotune results --json`` prints."""
    return {"runs": [row_document(row) for row in rows]}


def show_document(run: RunRecord, ledgers: list[Ledger]) -> dict[str, Any]:
    """What ``zerotune show --json`` prints: a run, its memory by rank, and the summary of its ledgers."""
    summary = summarise(ledgers)
    memory = [use.model_dump(mode="json") for use in run.measurement.memory] if run.measurement else None
    return run_document(run) | plain(
        {
            "memory_by_rank": memory,
            "ledger": summary.model_dump(mode="json") if summary else None,
            "bench": bench_document(run.bench) if run.bench else None,
        }
    )


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """What ``zerotune compare --json`` prints; differences are pairs of the first run's and the second's value."""
    return plain(
        {
            "runs": [run_document(comparison.first), run_document(comparison.second)],
            "comparable": comparison.is_comparable,
            "notes": list(comparison.notes),
            "config": {each.path: [each.before, each.after] for each in comparison.config},
            "workload": {name: list(pair) for name, pair in comparison.workload.items()},
            "cluster": {name: list(pair) for name, pair in comparison.cluster.items()},
            "versions": {name: list(pair) for name, pair in comparison.versions.items()},
            "ratios": {
                each.name: {"value": each.ratio.value, "low": each.ratio.low, "high": each.ratio.high}
                for each in comparison.figures
                if each.ratio
            },
            "faster": comparison.faster.run_id if comparison.faster else None,
            "is_tie": comparison.is_tie,
        }
    )


def plain(value: Any) -> Any:
    """The same value with ``null`` in place of what JSON cannot say: NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(child) for child in value]
    return value


def _in_turns(confirmed: Confirmed) -> dict[str, Any]:
    return {
        "rounds": confirmed.rounds,
        "tokens_per_second": confirmed.tokens_per_second.value,
        "tokens_per_second_ci": _bounds(confirmed.tokens_per_second),
        "step_time_s": confirmed.step_time_s.value,
        "step_time_s_ci": _bounds(confirmed.step_time_s),
    }


def _bounds(interval: Interval | None) -> list[float] | None:
    return [interval.low, interval.high] if interval else None


def _fingerprint(fingerprint: Fingerprint) -> dict[str, Any]:
    return {"key": fingerprint.key, "facts": fingerprint.facts}

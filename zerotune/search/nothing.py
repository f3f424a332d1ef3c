"""A search without a winner says why, and what came closest."""

from __future__ import annotations

from collections.abc import Sequence

import humanize

from zerotune.config.errors import NothingFeasible, RunFailed, ZerotuneError
from zerotune.config.schema import JobConfig
from zerotune.records import RunRecord, Status
from zerotune.search.configuration import changes
from zerotune.search.progress import histogram


def _bytes(amount: int) -> str:
    return humanize.naturalsize(amount, binary=True, format="%.1f")


def _reasons(trials: Sequence[RunRecord]) -> str:
    counts = histogram(trials)
    over = sum(row.status is Status.COMPLETE for row in trials)
    words = [f"{over} over the memory budget"] if over else []
    words += [f"{count} {status}" for status, count in counts.items() if status != Status.COMPLETE.value]
    return ", ".join(words)


def why_no_winner(trials: Sequence[RunRecord], baseline: JobConfig) -> ZerotuneError:
    """The error that ends a search in which no trial is feasible.

    Args:
        trials: Its finished trials, at least one.
        baseline: The defaults, to name a configuration by what differs.
    """
    measured = [row for row in trials if row.measurement is not None]
    if measured:
        closest = min(measured, key=_peak)
        budget = closest.memory_budget
        assert budget is not None, "a measured trial is infeasible only under a budget"
        knobs = ", ".join(f"{name}={value}" for name, value in changes(closest.config, baseline).items())
        return NothingFeasible(
            f"nothing meets the memory budget of {_bytes(budget)} ({_reasons(trials)}); the closest is trial"
            f" {closest.trial_number} ({knobs or 'the defaults'}) with {_bytes(_peak(closest))},"
            f" {_bytes(_peak(closest) - budget)} too much",
            f"raise --memory-budget to {-(-_peak(closest) // 2**20)}MiB, or give it more ranks",
        )
    first = next((row for row in trials if not row.status.is_oom), trials[0])
    if first.status.is_oom:
        return NothingFeasible(
            f"every trial ran out of memory ({_reasons(trials)})",
            "try the space 'memory', a smaller micro-batch or more ranks",
        )
    return all_failed(trials)


def all_failed(trials: Sequence[RunRecord]) -> RunFailed:
    """The error when no trial ran to its end: what the first failure said, and where its log is."""
    first = next((row for row in trials if not row.status.is_oom), trials[0])
    failure = first.failure
    said = failure.message if failure else first.status.value
    log = failure.log_path if failure and failure.log_path else first.run_dir
    return RunFailed(
        f"no trial ran to its end ({_reasons(trials)}); trial {first.trial_number} failed first: {said}",
        f"see {log}" + (f"; {failure.remedy}" if failure and failure.remedy else ""),
    )


def _peak(row: RunRecord) -> int:
    assert row.measurement is not None
    return row.measurement.peak_memory_bytes

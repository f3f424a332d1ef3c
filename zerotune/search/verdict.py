"""What came out of a search, in one line, and a tie called a tie."""

from __future__ import annotations

import humanize

from zerotune.records import Confirmed, Interval, RunRecord
from zerotune.records.events import SearchResult


def verdict(result: SearchResult, objective: str) -> str:
    """Why the winner is the winner.

    Args:
        result: The finished search.
        objective: ``throughput``, ``memory`` or ``pareto``.
    """
    best, baseline = result.best, result.baseline
    if objective == "memory":
        return _by_memory(result)
    if best.is_baseline:
        others = [each for each in result.confirmed if each.run_id != best.run_id]
        if any(each.speedup.high >= 1 for each in others):
            return (
                f"the defaults are as fast as anything that was tried, within the noise (run {best.run_id})"
            )
        return f"the defaults are the fastest of what was tried (run {best.run_id})"
    if result.speedup is None or baseline is None:
        return (
            f"best: run {best.run_id}; no speed-up, because the defaults failed or do not fit"
            f" (reference: run {result.reference})"
        )
    speed = (
        f"{_factor(result.speedup)} of the baseline's speed in {result.confirmed[0].rounds} rounds in turns"
    )
    rival = _faster(result)
    if not result.is_tie:
        line = f"best: run {best.run_id}, {speed} (95 % interval)"
    elif _peak(best) < _peak(baseline):
        line = f"a tie with the defaults: run {best.run_id} makes {speed}, which is inside the noise"
        if rival is None or rival.run_id == baseline.run_id:
            return f"{line}; chosen for its smaller peak memory, {_memory(best)} against {_memory(baseline)}"
    else:
        line = f"a tie with the defaults: run {best.run_id} makes {speed}, which is inside the noise"
    if rival is not None and rival.run_id != baseline.run_id:
        line += (
            f"; run {rival.run_id} makes {_factor(rival.speedup)}, a tie with it that takes more memory,"
            f" {_memory(_row(result, rival))} against {_memory(best)}"
        )
    return line


def _by_memory(result: SearchResult) -> str:
    best, baseline = result.best, result.baseline
    if best.is_baseline:
        return (
            f"nothing that was tried takes less memory than the defaults, {_memory(best)} (run {best.run_id})"
        )
    line = f"smallest peak memory: run {best.run_id}, {_memory(best)}"
    if result.speedup is None or baseline is None:
        return f"{line}; the defaults failed or do not fit"
    rounds = f"in {result.confirmed[0].rounds} rounds in turns"
    return f"{line} against the defaults' {_memory(baseline)}, at {_factor(result.speedup)} of their speed {rounds}"


def _faster(result: SearchResult) -> Confirmed | None:
    """The fastest in turns, if that is not the winner: the two are a tie, in which memory decided."""
    fastest = max(result.confirmed, key=lambda each: each.speedup.value, default=None)
    return None if fastest is None or fastest.run_id == result.best.run_id else fastest


def _row(result: SearchResult, confirmed: Confirmed) -> RunRecord:
    return next(row for row in result.trials if row.run_id == confirmed.run_id)


def _peak(run: RunRecord) -> int:
    assert run.measurement is not None, "only measured runs are confirmed"
    return run.measurement.peak_memory_bytes


def _memory(run: RunRecord) -> str:
    return humanize.naturalsize(_peak(run), binary=True, format="%.1f")


def _factor(ratio: Interval) -> str:
    return f"{ratio.value:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]"

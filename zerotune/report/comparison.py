"""Two runs beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerotune.records import Interval, Measurement, RunKind, RunRecord, Status
from zerotune.report.differences import Difference, config_differences
from zerotune.report.ratio import unpaired_ratio


@dataclass(frozen=True)
class Figure:
    """One measured figure of both runs.

    Attributes:
        name: As in the JSON of a run, e.g. ``step_time_s``.
        first: Of the first run, if it was measured.
        second: Of the second.
        ratio: Second over first, if both were measured; a point where the figure has no interval.
    """

    name: str
    first: float | None
    second: float | None
    ratio: Interval | None


@dataclass(frozen=True)
class Comparison:
    """In what two runs differ. Pairs are the first run's value and the second's.

    Attributes:
        first: The one that ratios are relative to.
        second: The other.
        config: Values of the configuration that differ, knobs first.
        workload: Facts of the workload that differ.
        cluster: Facts of the cluster that differ.
        versions: Versions that differ.
        figures: What was measured.
        notes: What one should know before believing the ratios, one line each.
    """

    first: RunRecord
    second: RunRecord
    config: tuple[Difference, ...]
    workload: dict[str, tuple[Any, Any]]
    cluster: dict[str, tuple[Any, Any]]
    versions: dict[str, tuple[Any, Any]]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]

    @property
    def is_comparable(self) -> bool:
        """Whether one of them can be called the faster: the same workload on the same cluster."""
        return not self.workload and not self.cluster

    @property
    def throughput(self) -> Interval | None:
        """Ratio of throughput, second over first, where both were measured."""
        return next(each.ratio for each in self.figures if each.name == "tokens_per_second")

    @property
    def is_tie(self) -> bool:
        """Whether the difference in throughput is inside the noise."""
        return bool(
            self.is_comparable and self.throughput and self.throughput.low <= 1 <= self.throughput.high
        )

    @property
    def faster(self) -> RunRecord | None:
        """The faster one; ``None`` if it is a tie, or they cannot be compared."""
        if not self.is_comparable or self.is_tie or self.throughput is None:
            return None
        return self.second if self.throughput.value > 1 else self.first


def compare(first: RunRecord, second: RunRecord) -> Comparison:
    """Compare two runs, whatever they are; what forbids a ranking is in the notes."""
    workload = first.workload.difference(second.workload)
    cluster = first.cluster.difference(second.cluster)
    names = sorted(set(first.versions) | set(second.versions))
    pairs = {name: (first.versions.get(name), second.versions.get(name)) for name in names}
    versions = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    notes = []
    if workload:
        notes.append(
            f"different workloads ({', '.join(workload)}): neither is the faster, they do different things"
        )
    if cluster:
        notes.append(
            f"different clusters ({', '.join(cluster)}): the difference is not of the configuration alone"
        )
    if versions:
        notes.append(f"different versions ({', '.join(versions)}): the difference may be theirs")
    for run in (first, second):
        if run.measurement is None:
            why = "it is a benchmark" if run.kind is RunKind.BENCH else run.status.value
            notes.append(f"{run.run_id} was not measured: {why}")
        elif run.status is Status.COMPLETE and run.feasible is False:
            notes.append(f"{run.run_id} is over its memory budget")
    return Comparison(
        first,
        second,
        tuple(config_differences(first.config, second.config)),
        workload,
        cluster,
        versions,
        _figures(first.measurement, second.measurement),
        tuple(notes),
    )


def _figures(first: Measurement | None, second: Measurement | None) -> tuple[Figure, ...]:
    both = (first, second)
    return (
        _with_interval("tokens_per_second", *[each.tokens_per_second if each else None for each in both]),
        _with_interval("step_time_s", *[each.step_time_s if each else None for each in both]),
        _exact("peak_memory_bytes", *[each.peak_memory_bytes if each else None for each in both]),
        _exact("final_loss", *[each.final_loss if each else None for each in both]),
        _exact("collectives_per_step", *[each.collectives_per_step if each else None for each in both]),
        _exact("sent_elements_per_step", *[each.sent_elements_per_step if each else None for each in both]),
    )


def _with_interval(name: str, first: Interval | None, second: Interval | None) -> Figure:
    ratio = unpaired_ratio(second, first) if first and second else None
    return Figure(name, first.value if first else None, second.value if second else None, ratio)


def _exact(name: str, first: float | None, second: float | None) -> Figure:
    ratio = second / first if first and second is not None else None
    return Figure(
        name, first, second, Interval(value=ratio, low=ratio, high=ratio) if ratio is not None else None
    )

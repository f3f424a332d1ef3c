"""A benchmark of engines in turns: on a cluster, or on two hosts of this machine with a link of a chosen rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zerotune.cluster.messages import Limits
from zerotune.cluster.shaped_link import RANKS, run_over_link
from zerotune.records import Fingerprint, RunKind, RunRecord, Status
from zerotune.records.bench import BenchReport
from zerotune.runs.cluster_key import cluster_fingerprint, device_model
from zerotune.runs.folders import runs_root
from zerotune.runs.reap import open_reaped
from zerotune.runs.rows import close_row, failed, open_row
from zerotune.runs.session import Placement, session
from zerotune.runs.workers import RayWorkers
from zerotune.store.store import Store
from zerotune.train.bench import BenchSpec, run_bench
from zerotune.train.context import Progress
from zerotune.train.workload import workload_fingerprint

LIMIT_S = 3600.0

Measure = Callable[[BenchSpec], BenchReport]


@dataclass(frozen=True)
class _Place:
    """Where a benchmark is measured.

    Attributes:
        store: Where its row goes.
        cluster: Fingerprint of the place.
        measure: Measures there.
    """

    store: Store
    cluster: Fingerprint
    measure: Measure


def bench(
    spec: BenchSpec,
    placement: Placement,
    store_url: str,
    link_bits_per_s: float | None,
    on_line: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> RunRecord:
    """Run a benchmark; its row holds the report.

    Args:
        spec: What to measure; its ``run_dir`` is set here.
        placement: Where, unless over a link.
        store_url: From :func:`zerotune.store.location.store_url`.
        link_bits_per_s: Rate of the link between two hosts of this machine; ``None`` takes the cluster.
        on_line: Told a line about what is joined, started or left behind, and the name of the run.
        on_progress: Called with the progress of rank 0.

    Returns:
        The run, complete.

    Raises:
        RunFailed: A rank failed, or two engines do not train the same; its row says so.
        ResourceError: There is no room for the ranks.
    """
    workload = workload_fingerprint(spec.job)
    with (
        _on_cluster(spec, placement, store_url, on_line, on_progress)
        if link_bits_per_s is None
        else _over_link(store_url, link_bits_per_s, on_line)
    ) as place:
        record = open_row(
            place.store, Path(runs_root(store_url)), RunKind.BENCH, spec.job, workload, place.cluster
        )
        try:
            on_line(f"run {record.run_id}, logs in {record.run_dir}")
            report = place.measure(spec.model_copy(update={"run_dir": record.run_dir}))
            place.store.save_ledgers(record.run_id, report.ledgers)
        except BaseException as error:
            close_row(place.store, failed(record, error))
            raise
        config = report.configs[report.engines[0].name]
        kept = {"config": config, "bench": report.model_copy(update={"ledgers": []})}
        return close_row(place.store, record.model_copy(update={"status": Status.COMPLETE, **kept}))


@contextmanager
def _on_cluster(
    spec: BenchSpec,
    placement: Placement,
    store_url: str,
    on_line: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> Iterator[_Place]:
    with session(spec.job, placement, store_url, on_line) as where:
        workers = where.executor.workers
        assert isinstance(workers, RayWorkers), "the session's own"

        def measure(spec: BenchSpec) -> BenchReport:
            return workers.call(run_bench, spec, spec.run_dir, Limits(), on_progress)[0]

        yield _Place(where.store, where.fingerprint, measure)


@contextmanager
def _over_link(store_url: str, bits_per_s: float, on_line: Callable[[str], None]) -> Iterator[_Place]:
    link = f"{bits_per_s / 1e9:g} Gbit/s between two hosts of one machine"
    with open_reaped(store_url, on_line) as store:
        yield _Place(
            store,
            cluster_fingerprint(device_model(False), 1, RANKS, link),
            lambda spec: run_over_link(bits_per_s, run_bench, spec, spec.run_dir, LIMIT_S)[0],
        )

"""A benchmark of engines in turns: on a cluster, or on two hosts of this machine with a link of a chosen rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zerotune.cluster.messages import Limits
from zerotune.cluster.shaped_link import run_over_link
from zerotune.records import RunKind
from zerotune.records.bench import BenchReport
from zerotune.runs.folders import run_folder, runs_root
from zerotune.runs.session import Placement, session
from zerotune.runs.workers import RayWorkers
from zerotune.store.ids import new_run_id
from zerotune.train.bench import BenchSpec, run_bench
from zerotune.train.context import Progress

REPORT = "bench.json"
"""File of a benchmark's folder that holds its report."""

LIMIT_S = 3600.0


def bench(
    spec: BenchSpec,
    placement: Placement,
    store_url: str,
    link_bits_per_s: float | None,
    on_line: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> tuple[BenchReport, Path]:
    """Run a benchmark and keep its report.

    Args:
        spec: What to measure; its ``run_dir`` is set here.
        placement: Where, unless over a link.
        store_url: Beside which runs have their folders.
        link_bits_per_s: Rate of the link between two hosts of this machine; ``None`` takes the cluster.
        on_line: Told a line about what is joined or started.
        on_progress: Called with the progress of rank 0.

    Returns:
        The report, and the folder that holds it and the ranks' logs.

    Raises:
        RunFailed: A rank failed, or two engines do not train the same.
        ResourceError: There is no room for the ranks.
    """
    folder = run_folder(Path(runs_root(store_url)), new_run_id(RunKind.BENCH))
    spec = spec.model_copy(update={"run_dir": str(folder)})
    if link_bits_per_s is not None:
        report = run_over_link(link_bits_per_s, run_bench, spec, str(folder), LIMIT_S)[0]
    else:
        with session(spec.job, placement, store_url, on_line) as where:
            workers = where.executor.workers
            assert isinstance(workers, RayWorkers), "the session's own"
            report = workers.call(run_bench, spec, str(folder), Limits(), on_progress)[0]
    (folder / REPORT).write_text(report.model_dump_json(indent=1), encoding="utf-8")
    return report, folder

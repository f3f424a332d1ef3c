"""One trial, confirmation or launch on a group of workers, and its row in the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zerotune.cluster.messages import Limits
from zerotune.config.errors import RunFailed
from zerotune.records import Fingerprint, RunKind, RunRecord, Status
from zerotune.runs.folders import write_resolved
from zerotune.runs.rows import close_row, failed, open_row
from zerotune.runs.workers import OnProgress, Workers
from zerotune.store.store import Store
from zerotune.train.context import Progress
from zerotune.train.spec import RankReport, RunSpec


@dataclass(frozen=True)
class RunRequest:
    """What to execute, and what for.

    Attributes:
        kind: Trial, confirmation or launch.
        spec: What every rank runs; its ``run_dir`` is set by the executor.
        workload: Fingerprint of what is trained.
        study: Study it belongs to, if any.
        trial_number: Number within the study.
        is_baseline: Whether these are the defaults.
        memory_budget: Bytes that the largest peak over ranks is held against.
        limits: How long it may take, phase by phase.
    """

    kind: RunKind
    spec: RunSpec
    workload: Fingerprint
    study: str | None = None
    trial_number: int | None = None
    is_baseline: bool = False
    memory_budget: int | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Executed:
    """How a run ended.

    Attributes:
        run: Its final row.
        losses: Loss of every step it took; empty if it failed.
    """

    run: RunRecord
    losses: list[float]


def _nothing(_: object) -> None:
    pass


@dataclass
class Executor:
    """Runs requests one after the other on one group of workers.

    Attributes:
        store: Where rows go.
        workers: Who runs them.
        cluster: Fingerprint of where they run.
        runs_folder: Parent of the runs' folders.
        executed: Number of runs so far.
    """

    store: Store
    workers: Workers
    cluster: Fingerprint
    runs_folder: Path
    executed: int = field(default=0, init=False)

    def execute(
        self,
        request: RunRequest,
        on_progress: OnProgress = _nothing,
        on_start: Callable[[RunRecord], None] = _nothing,
    ) -> Executed:
        """Run a request to its end and return its final row.

        A run that fails is a row with a ``failure``, not an exception. What no other configuration would mend, a
        wrong file or a cluster that is gone, is both.

        Args:
            request: What to run.
            on_progress: Called with the progress of rank 0.
            on_start: Called with the row once it is in the store.

        Raises:
            ResourceError: The cluster cannot give the ranks any more.
            UsageError: The job is wrong, or the store or the run's folder cannot be written.
            KeyboardInterrupt: Broken off by the user; the row says ``interrupted``.
        """
        record = self._open(request)
        losses: list[float] = []
        steps_done = 0

        def progressed(progress: Progress) -> None:
            nonlocal steps_done
            if progress.phase in ("train", "save"):
                steps_done = progress.step
            on_progress(progress)

        try:
            on_start(record)
            reports = self._run(request, record, progressed)
        except RunFailed as error:
            record = failed(record, error, steps_done)
        except BaseException as error:
            close_row(self.store, failed(record, error, steps_done))
            raise
        else:
            record = _with_reports(record, reports)
            losses = reports[0].losses
            if record.run_dir is not None and record.config != request.spec.job:
                write_resolved(Path(record.run_dir), record.config)
            ledgers = [report.ledger for report in reports if report.ledger is not None]
            if ledgers:
                self.store.save_ledgers(record.run_id, ledgers)
        return Executed(close_row(self.store, record), losses)

    def close(self) -> None:
        """End the workers."""
        self.workers.close()

    def _open(self, request: RunRequest) -> RunRecord:
        record = open_row(
            self.store,
            self.runs_folder,
            request.kind,
            request.spec.job,
            request.workload,
            self.cluster,
            study=request.study,
            trial_number=request.trial_number,
            is_baseline=request.is_baseline,
            memory_budget=request.memory_budget,
        )
        self.executed += 1
        return record

    def _run(self, request: RunRequest, record: RunRecord, on_progress: OnProgress) -> list[RankReport]:
        assert record.run_dir is not None
        spec = request.spec.model_copy(update={"run_dir": record.run_dir})
        return self.workers.run(spec, request.limits, on_progress)


def _with_reports(record: RunRecord, reports: list[RankReport]) -> RunRecord:
    first = reports[0]
    measurement = first.measurement
    feasible = None
    if record.memory_budget is not None and measurement is not None:
        feasible = measurement.peak_memory_bytes <= record.memory_budget
    return record.model_copy(
        update={
            "status": Status.COMPLETE,
            "config": first.job,
            "measurement": measurement,
            "feasible": feasible,
            "checkpoint": first.checkpoint,
            "steps_done": first.first_step + len(first.losses),
        }
    )

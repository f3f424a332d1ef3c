"""A run's row in the store, from its beginning to its end.

The row is written as ``running`` before anything is started and always gets an ending: what was measured, the first
cause of a failure, or ``interrupted``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerotune.config.errors import RunFailed, ZerotuneError
from zerotune.config.schema import JobConfig
from zerotune.records import Failure, Fingerprint, RunKind, RunRecord, Status
from zerotune.records.run import now
from zerotune.runs.folders import run_folder, write_resolved
from zerotune.runs.owner import this_owner
from zerotune.runs.resume import saved_by
from zerotune.runs.versions import versions
from zerotune.store.ids import new_run_id
from zerotune.store.store import Store

_INTERRUPTED = Failure(status=Status.INTERRUPTED, message="interrupted by the user")


def open_row(
    store: Store,
    runs_folder: Path,
    kind: RunKind,
    job: JobConfig,
    workload: Fingerprint,
    cluster: Fingerprint,
    **more: Any,
) -> RunRecord:
    """Make a run's folder and add its row.

    Args:
        store: Where the row goes.
        runs_folder: Parent of the runs' folders.
        kind: What it is executed for.
        job: Its configuration.
        workload: What is trained.
        cluster: Where.
        more: Other fields of the record.

    Raises:
        UsageError: The folder or the store cannot be written.
    """
    run_id = new_run_id(kind)
    folder = run_folder(runs_folder, run_id)
    write_resolved(folder, job)
    record = RunRecord(
        run_id=run_id,
        kind=kind,
        status=Status.RUNNING,
        config=job,
        workload=workload,
        cluster=cluster,
        versions=versions(),
        owner=this_owner(),
        run_dir=str(folder),
        **more,
    )
    store.add_run(record)
    return record


def close_row(store: Store, record: RunRecord) -> RunRecord:
    """Note that a run has ended, as its record says."""
    record = record.model_copy(update={"ended": now()})
    store.update_run(record)
    return record


def failed(record: RunRecord, error: BaseException, steps_done: int = 0) -> RunRecord:
    """The record of a run that an error has ended, with what it had saved.

    What no other configuration would mend, a wrong file or a cluster that is gone, is ``not_launched``.
    """
    failure = _cause(error)
    saved = saved_by(record.run_dir)
    return record.model_copy(
        update={
            "status": failure.status,
            "failure": failure,
            "checkpoint": str(saved[1]) if saved else None,
            "steps_done": steps_done,
        }
    )


def _cause(error: BaseException) -> Failure:
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    failure = getattr(error, "failure", None)
    if isinstance(error, ZerotuneError) and not isinstance(error, RunFailed):
        failure = failure if isinstance(failure, Failure) else _said(error)
        return failure.model_copy(update={"status": Status.NOT_LAUNCHED})
    if isinstance(failure, Failure):
        return failure
    if isinstance(error, RunFailed):
        return _said(error)
    return Failure(status=Status.FAILED, message=f"{type(error).__name__}: {error}")


def _said(error: ZerotuneError) -> Failure:
    return Failure(status=Status.FAILED, message=error.message, remedy=error.remedy)

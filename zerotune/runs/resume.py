"""Where a launch with ``--resume`` goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerotune.checkpoints import complete_checkpoints
from zerotune.config.errors import UsageError
from zerotune.config.schema import JobConfig
from zerotune.records import Fingerprint, RunKind, RunRecord
from zerotune.store.store import Store
from zerotune.train.saving import FOLDER


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to go on from.

    Attributes:
        run: The run that saved it.
        folder: Folder of its checkpoints.
        step: Steps that the latest of them has taken.
    """

    run: RunRecord
    folder: Path
    step: int


def checkpoints_of(run_dir: str | None) -> Path | None:
    """Folder of a run's checkpoints, if it has a complete one; it may have ended before it could say so."""
    if run_dir is None:
        return None
    folder = Path(run_dir) / FOLDER
    return folder if folder.is_dir() and complete_checkpoints(folder) else None


def latest_checkpoint(store: Store, workload: Fingerprint, job: JobConfig) -> Resumed:
    """The checkpoint of the youngest launch of this workload that has one.

    Raises:
        UsageError: There is none.
    """
    for run in reversed(store.runs(workload_key=workload.key, kind=RunKind.LAUNCH)):
        folder = checkpoints_of(run.run_dir)
        if folder is not None:
            return Resumed(run, folder, max(step for step, _ in complete_checkpoints(folder)))
    if job.train.save_every is None:
        remedy = "set train.save_every in model.yaml, so that a launch saves some"
    else:
        remedy = "launch without --resume"
    raise UsageError("there is no checkpoint of this workload to resume from", remedy)

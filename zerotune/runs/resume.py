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


def saved_by(run_dir: str | None) -> tuple[int, Path] | None:
    """Step and path of the last complete checkpoint of a run, which may have ended before it could say so."""
    if run_dir is None or not (folder := Path(run_dir) / FOLDER).is_dir():
        return None
    return max(complete_checkpoints(folder), default=None)


def latest_checkpoint(store: Store, workload: Fingerprint, job: JobConfig) -> Resumed:
    """The checkpoint of the youngest launch of this workload that has one.

    Raises:
        UsageError: There is none, or it has taken all the steps that are wanted.
    """
    for run in reversed(store.runs(workload_key=workload.key, kind=RunKind.LAUNCH)):
        if (saved := saved_by(run.run_dir)) is not None:
            return _going_on(Resumed(run, saved[1].parent, saved[0]), job)
    if job.train.save_every is None:
        remedy = "set train.save_every in model.yaml, so that a launch saves some"
    else:
        remedy = "launch without --resume"
    raise UsageError("there is no checkpoint of this workload to resume from", remedy)


def _going_on(resumed: Resumed, job: JobConfig) -> Resumed:
    if resumed.step >= job.train.steps:
        raise UsageError(
            f"run {resumed.run.run_id} has already taken {resumed.step} of train.steps {job.train.steps}",
            "ask for more with --steps",
        )
    return resumed

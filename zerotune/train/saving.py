"""When and where a run saves, and from where it goes on."""

from __future__ import annotations

from pathlib import Path

from zerotune import checkpoints
from zerotune.config.errors import UsageError
from zerotune.config.schema import JobConfig
from zerotune.train.engines import TunedEngine

FOLDER = "checkpoints"
"""Folder of a run's checkpoints within its own folder."""


def is_due(job: JobConfig, done: int) -> bool:
    """Whether to save after ``done`` steps: every ``save_every``, and at the end of a run that saves at all."""
    every = job.train.save_every
    return every is not None and (done % every == 0 or done == job.train.steps)


def save(engine: TunedEngine, run_dir: str, done: int) -> str:
    """Save the state after ``done`` steps and return the path of the checkpoint; collective."""
    return str(checkpoints.save(engine, Path(run_dir) / FOLDER, done))


def begin_save(engine: TunedEngine, run_dir: str, done: int) -> None:
    """Save the state after ``done`` steps while training goes on; collective.

    Raises:
        RunFailed: The save before it could not be written.
    """
    checkpoints.begin_save(engine, Path(run_dir) / FOLDER, done)


def finish(engine: TunedEngine) -> str | None:
    """Wait for the save that is under way; collective. Returns its path, or ``None`` if there is none.

    Raises:
        RunFailed: It could not be written.
    """
    path = checkpoints.finish_save(engine)
    return None if path is None else str(path)


def abandon(engine: TunedEngine) -> None:
    """After an error: let what is being written come to its end, without a word to the other ranks."""
    checkpoints.abandon_save(engine)


def resume(engine: TunedEngine, folder: str, job: JobConfig) -> int:
    """Load the last checkpoint and return the number of steps it had taken; collective.

    Raises:
        UsageError: There is no step left to take.
    """
    done, _ = checkpoints.load(engine, folder)
    if done >= job.train.steps:
        raise UsageError(
            f"{folder} has already taken {done} of train.steps {job.train.steps}", "ask for more with --steps"
        )
    return done

"""The folder of one run: its logs, its checkpoints, its resolved configuration."""

from __future__ import annotations

from pathlib import Path

from zerotune.config.dump import dump_job
from zerotune.config.errors import UsageError
from zerotune.config.schema import JobConfig
from zerotune.store.connect import parse_url, sqlite_file

RESOLVED = "config.resolved.yaml"


def runs_root(store_url: str) -> Path:
    """Where runs have their folders: beside the store's file, or for a server in ``results/runs`` of this folder."""
    file = sqlite_file(parse_url(store_url))
    return file.parent if file is not None else Path("results", "runs").absolute()


def run_folder(root: Path, run_id: str) -> Path:
    """Make the folder of a run below ``root`` and return its absolute path.

    Raises:
        UsageError: It cannot be made.
    """
    folder = (root / run_id).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder of the run, {folder}: {error.strerror or error}",
            "give a store in a folder that can be written with --store",
        ) from error
    return folder


def write_resolved(folder: Path, job: JobConfig) -> None:
    """Write the configuration as it runs, every default and every ``auto`` written out."""
    (folder / RESOLVED).write_text(dump_job(job), encoding="utf-8")

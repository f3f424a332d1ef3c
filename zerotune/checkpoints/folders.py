"""Where checkpoints lie, and how one becomes visible: written aside, then published by one rename."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from zerotune.config.errors import UsageError

MANIFEST = "zerotune.json"
_STEP = re.compile(r"^step-(\d{8})$")


def final_path(folder: Path, step: int) -> Path:
    """Path of the complete checkpoint of a step."""
    return folder / f"step-{step:08d}"


def aside_path(folder: Path, step: int) -> Path:
    """Path at which it is written before it is published."""
    return folder / f".step-{step:08d}.partial"


def prepare(folder: Path, step: int) -> Path:
    """Make an empty place to write to; what an interrupted save left there is removed. For one rank."""
    aside = aside_path(folder, step)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    return aside


def publish(folder: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Make a completely written checkpoint visible, atomically. For one rank, after all have written.

    An older checkpoint of the same step is replaced.
    """
    aside, final = aside_path(folder, step), final_path(folder, step)
    with open(aside / MANIFEST, "w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(aside)
    if final.exists():
        old = folder / f".step-{step:08d}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        aside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        aside.rename(final)
    _sync_folder(folder)
    return final


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints in a folder, the oldest first. Unpublished ones have another name and are skipped."""
    found = []
    if folder.is_dir():
        for path in folder.iterdir():
            match = _STEP.match(path.name)
            if match and (path / MANIFEST).is_file() and (path / ".metadata").is_file():
                found.append((int(match[1]), path))
    return sorted(found)


def latest(folder: Path) -> Path:
    """The newest complete checkpoint in a folder, or the folder itself if it is one.

    Raises:
        UsageError: There is none.
    """
    if (folder / MANIFEST).is_file():
        return folder
    found = complete_checkpoints(folder)
    if not found:
        raise UsageError(f"{folder}: no complete checkpoint here", "name the folder of a run that saved one")
    return found[-1][1]


def read_manifest(path: Path) -> dict[str, Any]:
    """What :func:`publish` wrote beside the tensors."""
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    return manifest


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

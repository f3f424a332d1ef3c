"""Where checkpoints lie, and how one becomes visible: written aside, then published by one rename.

[Note: names]
``step-00000042``          complete, unless its content was damaged since
``.step-00000042.partial`` being written, or left by a save that was interrupted
``.step-00000042.old``     the complete one that the same step's next save is about to replace; it counts as long as
                           the new one is not there
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from zerotune.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from zerotune.config.errors import UsageError

log = logging.getLogger(__name__)

METADATA = ".metadata"
"""The file of torch.distributed.checkpoint that says which tensor lies where."""

_STEP = re.compile(r"^step-(\d{8,})$")
_OLD = re.compile(r"^\.step-(\d{8,})\.old$")
_PARTIAL = re.compile(r"^\.step-(\d{8,})\.partial$")


def final_path(folder: Path, step: int) -> Path:
    """Path of the complete checkpoint of a step."""
    return folder / f"step-{step:08d}"


def aside_path(folder: Path, step: int) -> Path:
    """Path at which it is written before it is published."""
    return folder / f".step-{step:08d}.partial"


def old_path(folder: Path, step: int) -> Path:
    """Path of the one that is being replaced."""
    return folder / f".step-{step:08d}.old"


def prepare(folder: Path, step: int) -> Path:
    """Make an empty place to write to, and remove what interrupted saves left. For one rank, with no save under way."""
    folder.mkdir(parents=True, exist_ok=True)
    clean(folder)
    aside = aside_path(folder, step)
    aside.mkdir()
    return aside


def clean(folder: Path) -> None:
    """Remove what interrupted saves left in a folder, and say so. For one rank, with no save under way."""
    for path in sorted(folder.iterdir()):
        old = _OLD.match(path.name)
        if old and not final_path(folder, int(old[1])).exists():
            path.rename(final_path(folder, int(old[1])))
            log.warning("%s: put back, its replacement was never finished", final_path(folder, int(old[1])))
        elif old or _PARTIAL.match(path.name):
            shutil.rmtree(path)
            log.warning("%s: removed, a save that was interrupted left it", path)


def publish(folder: Path, step: int, manifest: Manifest) -> Path:
    """Make a completely written checkpoint visible, atomically. For one rank, after all have written.

    An older checkpoint of the same step is replaced.
    """
    aside, final = aside_path(folder, step), final_path(folder, step)
    files = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
    with open(aside / MANIFEST, "w") as file:
        file.write(manifest.model_copy(update={"files": files}).to_json())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(aside)
    old = old_path(folder, step)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    aside.rename(final)
    sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)
    return final


def what_is_missing(path: Path) -> str | None:
    """Why a folder is not a complete checkpoint, or ``None`` if it is one; it looks at sizes, not at contents."""
    try:
        manifest = read_manifest(path)
    except OSError:
        return f"it has no readable {MANIFEST}"
    except UsageError as error:
        return error.message.removeprefix(f"{path}: ")
    if METADATA not in manifest.files:
        return f"it has no {METADATA}"
    for name, size in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} of {size} bytes"
    return None


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of the complete checkpoints in a folder, the oldest first.

    What an interrupted save left has another name; what was damaged later is told by its content, and logged.
    """
    found: dict[int, Path] = {}
    if not folder.is_dir():
        return []
    for path in sorted(folder.iterdir()):
        match = _STEP.match(path.name) or _OLD.match(path.name)
        if match is None:
            continue
        missing = what_is_missing(path)
        if missing is not None:
            log.warning("%s: skipped, %s", path, missing)
        elif int(match[1]) not in found or _STEP.match(path.name):
            found[int(match[1])] = path
    return sorted(found.items())


def latest(folder: Path) -> Path:
    """The newest complete checkpoint in a folder, or the folder itself if it is one.

    Raises:
        UsageError: There is none.
    """
    if (folder / MANIFEST).is_file() or _STEP.match(folder.name):
        missing = what_is_missing(folder)
        if missing is not None:
            raise UsageError(f"{folder}: the checkpoint is incomplete: {missing}")
        return folder
    found = complete_checkpoints(folder)
    if not found:
        raise UsageError(f"{folder}: no complete checkpoint here", "name the folder of a run that saved one")
    return found[-1][1]


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

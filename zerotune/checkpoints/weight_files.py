"""Loading plain weights from safetensors files: every rank reads its own slices of them, nothing else."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerotune.checkpoints.flat_slice import FlatSlice
from zerotune.checkpoints.manifest import Weight
from zerotune.checkpoints.sharded import Checkpointable
from zerotune.config.errors import UsageError
from zerotune.engine.meeting import first_line, meet, together

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    file: Any
    shape: tuple[int, ...]


class WeightFiles:
    """A safetensors file, or a folder of them, as ``save_pretrained`` and ``zerotune export --to weights`` write.

    Args:
        path: A file, or a folder. Where a folder has an index (``*.safetensors.index.json``), the files that it names
            count, else all.

    Raises:
        UsageError: There is none, one cannot be read, or two hold the same name.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._entries: dict[str, _Entry] = {}
        for file in _files_of(self.path):
            self._open(file)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: e.shape for name, e in self._entries.items()}
        """Shape of every tensor, by name."""

    def read(self, name: str, start: int, end: int) -> torch.Tensor:
        """The elements ``[start, end)`` of a tensor, flattened; only the rows that hold them are read  # 1D"""
        entry = self._entries[name]
        if start >= end:
            return torch.empty(0)
        if not entry.shape:
            return entry.file.get_tensor(name).reshape(1)
        row = math.prod(entry.shape[1:])
        first, last = start // row, -(-end // row)
        rows = entry.file.get_slice(name)[first:last]
        return rows.reshape(-1)[start - first * row : end - first * row]

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = safe_open(str(path), framework="pt")
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} cannot be read as safetensors: {first_line(error)}") from error
        for name, shape in shapes.items():
            if name in self._entries:
                raise UsageError(
                    f"{name} is in two files of {self.path}, one of them {path.name}",
                    "keep one set of files in the folder",
                )
            self._entries[name] = _Entry(file, shape)


def load_weights(engine: Checkpointable, path: str | Path | WeightFiles, strict: bool = True) -> None:
    """Load plain weights into an engine; a collective call, between steps. Optimizer state stays as it is.

    Every rank reads its slices straight into place, whatever the ranks and the stage. Values are converted to the fp32
    of the masters, or to a buffer's own dtype. A tensor that the model has under several names may be in the files
    under any of them; as with the plain model's ``load_state_dict``, the last one counts.

    Args:
        engine: What to load into.
        path: A safetensors file or a folder of them, readable on every rank.
        strict: Whether the files must hold exactly what the model's ``state_dict()`` does. Otherwise what is missing
            keeps its values and what is unknown is left out, both with a warning.

    Raises:
        UsageError: A file cannot be read, a shape differs, or with ``strict`` a name is missing or unknown; raised on
            every rank.
    """
    meet(engine.group, "loading weights")
    engine.flush()
    what = f"loading {path.path if isinstance(path, WeightFiles) else path}"

    def load() -> None:
        files = path if isinstance(path, WeightFiles) else WeightFiles(path)
        sources = _match(files, engine.weights(), strict)
        targets = engine.sharded_state()
        with torch.no_grad():
            for key, name in sources.items():
                _read_into(targets[key], files, name)

    together(engine.group, what, load)
    engine.refresh()


def _read_into(target: torch.Tensor, files: WeightFiles, name: str) -> None:
    if isinstance(target, FlatSlice):
        target.local.copy_(files.read(name, target.offset, target.offset + target.local.numel()))
    else:
        target.copy_(files.read(name, 0, target.numel()).view(target.shape))


def _match(files: WeightFiles, weights: list[Weight], strict: bool) -> dict[str, str]:
    """For each key of the engine's state the name of the tensor that fills it."""
    first_names = {weight.name: weight for weight in weights if weight.same_as is None}
    sources: dict[str, str] = {}
    for weight in weights:
        if weight.name not in files.shapes:
            continue
        if files.shapes[weight.name] != weight.shape:
            raise UsageError(
                f"{weight.name} has shape {files.shapes[weight.name]} in {files.path}, the model's is {weight.shape}"
            )
        key = first_names[weight.same_as or weight.name].key
        assert key is not None, "a tensor's first name has a key"
        sources[key] = weight.name
    missing = [name for name, weight in first_names.items() if weight.key not in sources]
    unknown = sorted(files.shapes.keys() - {weight.name for weight in weights})
    problems = [
        f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for what, names in (("it lacks", missing), ("the model has no", unknown))
        if names
    ]
    if problems and strict:
        raise UsageError(
            f"{files.path} does not fit the model: {'; '.join(problems)}",
            "load it with strict=False to leave these alone",
        )
    for problem in problems:
        logger.warning("%s: %s", files.path, problem)
    return sources


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"there are no weights at {path}", "name a safetensors file or a folder of them")
    indices = sorted(path.glob("*.safetensors.index.json"))
    if indices:
        try:
            named = set(json.loads(indices[0].read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, OSError) as error:
            raise UsageError(f"{indices[0]} cannot be read: {first_line(error)}") from error
        absent = sorted(name for name in named if not (path / name).is_file())
        if absent:
            raise UsageError(f"{path} lacks {absent[0]}, which {indices[0].name} names")
        return [path / name for name in sorted(named)]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(f"there is no safetensors file in {path}", "zerotune export --to weights writes one")
    return files

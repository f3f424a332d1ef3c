"""What stands beside the tensors of a checkpoint: everything about it that is not a tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from zerotune.config.errors import UsageError
from zerotune.records.base import Record

MANIFEST = "zerotune.json"

FORMAT = 2
"""Version of the layout of keys and manifest."""


class Weight(Record):
    """One entry of the model's ``state_dict()``.

    Attributes:
        name: Its name there.
        shape: Of the full tensor.
        dtype: As torch spells it, without ``torch.``; masters are float32.
        key: Of the tensor in the checkpoint; ``None`` for a second name of a tensor.
        same_as: First name of the tensor, if this is another one (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    key: str | None = None
    same_as: str | None = None


class RankWindow(Record):
    """What one rank has put into an accumulation window.

    Attributes:
        loss: Sum of weight times loss.
        weight: Sum of weights.
        untouched: Trainable parameters of which no gradient was reduced on this rank.
        held: Parameters whose full gradient this rank holds, to be reduced at the end of the window.
    """

    loss: float
    weight: float
    untouched: list[str]
    held: list[str] = Field(default_factory=list)


class Window(Record):
    """An accumulation window that was open when it was saved.

    Attributes:
        position: Micro-batches in it so far.
        ranks: Every rank's part, in rank order.
        summed: Parameters whose gradient sums are in the checkpoint.
    """

    position: int
    ranks: list[RankWindow]
    summed: list[str]


class Manifest(Record):
    """The file ``zerotune.json`` of a checkpoint.

    Attributes:
        format: :data:`FORMAT`.
        step: Optimizer steps taken.
        ranks: Number of ranks that saved it.
        optimizer_groups: Settings of the optimizer's groups.
        optimizer_values: Optimizer state that is no tensor, by parameter.
        engine_values: Small state of the engine, such as its loss scale.
        window: The open accumulation window, if it was saved inside one.
        weights: What the model's ``state_dict()`` holds, in its order.
        extra: What the caller keeps with it.
        files: Bytes of every other file; what differs is incomplete.
    """

    format: int = FORMAT
    step: int
    ranks: int
    optimizer_groups: list[dict[str, Any]]
    optimizer_values: dict[str, dict[str, Any]] = Field(default_factory=dict)
    engine_values: dict[str, Any] = Field(default_factory=dict)
    window: Window | None = None
    weights: list[Weight]
    extra: dict[str, Any]
    files: dict[str, int] = Field(default_factory=dict)

    def to_json(self) -> str:
        """As text; numbers that are not finite are spelt ``NaN`` and ``Infinity``.

        Raises:
            UsageError: The caller's part cannot be written as JSON.
        """
        try:
            return json.dumps(self.model_dump())
        except (TypeError, ValueError) as error:
            raise UsageError(f"what is to be kept with the checkpoint is not JSON: {error}") from None


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Args:
        path: Folder of the checkpoint.

    Raises:
        OSError: It cannot be read.
        UsageError: It is no manifest, or of a version that this one does not know.
    """
    try:
        content = json.loads((path / MANIFEST).read_text())
    except ValueError as error:
        raise UsageError(f"{path}: {MANIFEST} is damaged: {error}") from None
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise UsageError(
            f"{path}: the checkpoint has format {version}, this version of zerotune reads {FORMAT}"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise UsageError(f"{path}: {MANIFEST} is damaged: {error.errors()[0]['msg']}") from None

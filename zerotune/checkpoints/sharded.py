"""Sharded save and load with torch.distributed.checkpoint: every rank writes and reads its own slices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerotune.checkpoints.folders import final_path, latest, prepare, publish, read_manifest
from zerotune.config.errors import RunFailed, UsageError
from zerotune.engine import RankGroup

FORMAT = 1
"""Version of the layout of keys and manifest."""


class Checkpointable(Protocol):
    """An engine whose state can be saved in a form that does not depend on the number of ranks.

    Keys are ``model/NAME``, ``buffer/NAME`` and ``optimizer/NAME/STATE``; sliced tensors are
    :class:`~zerotune.checkpoints.flat_slice.FlatSlice`, others are the same on every rank.
    """

    @property
    def group(self) -> RankGroup: ...

    steps: int

    def sharded_state(self) -> dict[str, torch.Tensor]:
        """This rank's part of parameters, buffers and optimizer state; loading writes into these tensors."""

    def expect_optimizer_state(self, found: Mapping[str, Mapping[str, tuple[torch.dtype, bool]]]) -> None:
        """Make room for optimizer state: for each parameter and state key its dtype and whether it is sliced."""

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Settings of the optimizer's groups (lr, betas, …), without the parameters."""

    def set_optimizer_groups(self, groups: list[dict[str, Any]]) -> None:
        """Load what :meth:`optimizer_groups` gave."""

    def refresh(self) -> None:
        """Rebuild every derived copy after the masters were written."""

    def flush(self) -> None:
        """Drop everything that is live."""


def save(
    engine: Checkpointable, folder: str | Path, step: int, extra: Mapping[str, Any] | None = None
) -> Path:
    """Save an engine's state; a collective call.

    Args:
        engine: What to save, between two steps.
        folder: Folder of checkpoints; this one is published in it as ``step-00000042``.
        step: Optimizer steps taken so far.
        extra: More to keep with it, as JSON.

    Returns:
        Path of the published checkpoint.

    Raises:
        RunFailed: It could not be written; every rank raises.
    """
    folder = Path(folder)
    group = engine.group
    aside = _on_rank_zero(group, lambda: prepare(folder, step), f"checkpoint of step {step} in {folder}")
    state = engine.sharded_state()
    state[f"rng/cpu/{group.rank}"] = torch.get_rng_state()
    if group.device.type == "cuda":
        state[f"rng/cuda/{group.rank}"] = torch.cuda.get_rng_state(group.device)
    try:
        with _quiet():
            dcp.save(
                state, checkpoint_id=str(aside), process_group=group.process_group, no_dist=group.size == 1
            )
    except Exception as error:
        raise RunFailed(
            f"checkpoint of step {step} could not be written to {folder}: {_first_line(error)}"
        ) from error
    manifest = {
        "format": FORMAT,
        "step": step,
        "ranks": group.size,
        "optimizer_groups": engine.optimizer_groups(),
        "extra": dict(extra or {}),
    }
    _on_rank_zero(group, lambda: publish(folder, step, manifest), f"checkpoint of step {step} in {folder}")
    return final_path(folder, step)


def load(engine: Checkpointable, folder: str | Path) -> tuple[int, dict[str, Any]]:
    """Load the newest complete checkpoint in a folder (or the one named); a collective call.

    It may have been saved by another number of ranks and at another stage. Random states are restored where this
    rank saved one.

    Returns:
        The step it was saved after, and what was kept with it.

    Raises:
        UsageError: There is none, or it is of another model.
    """
    path = latest(Path(folder))
    manifest = read_manifest(path)
    engine.flush()
    group = engine.group
    reader = dcp.FileSystemReader(str(path))
    saved = reader.read_metadata().state_dict_metadata
    engine.expect_optimizer_state(_optimizer_state_in(saved))
    state = engine.sharded_state()
    _compare(state, saved, path)
    random = {key: torch.zeros_like(value) for key, value in _random_states(group).items() if key in saved}
    state.update(random)
    with _quiet():
        dcp.load(state, storage_reader=reader, process_group=group.process_group, no_dist=group.size == 1)
    if f"rng/cpu/{group.rank}" in random:
        torch.set_rng_state(random[f"rng/cpu/{group.rank}"])
    if f"rng/cuda/{group.rank}" in random:
        torch.cuda.set_rng_state(random[f"rng/cuda/{group.rank}"], group.device)
    engine.set_optimizer_groups(manifest["optimizer_groups"])
    engine.steps = manifest["step"]
    engine.refresh()
    return manifest["step"], manifest["extra"]


def _random_states(group: RankGroup) -> dict[str, torch.Tensor]:
    states = {f"rng/cpu/{group.rank}": torch.get_rng_state()}
    if group.device.type == "cuda":
        states[f"rng/cuda/{group.rank}"] = torch.cuda.get_rng_state(group.device)
    return states


def _optimizer_state_in(saved: Mapping[str, Any]) -> dict[str, dict[str, tuple[torch.dtype, bool]]]:
    found: dict[str, dict[str, tuple[torch.dtype, bool]]] = {}
    for key, metadata in saved.items():
        if key.startswith("optimizer/") and isinstance(metadata, TensorStorageMetadata):
            _, name, state = key.split("/")
            found.setdefault(name, {})[state] = (metadata.properties.dtype, len(metadata.size) == 1)
    return found


def _compare(state: Mapping[str, torch.Tensor], saved: Mapping[str, Any], path: Path) -> None:
    mine = {key for key in state if not key.startswith("rng/")}
    theirs = {key for key in saved if not key.startswith("rng/")}
    for key in sorted(mine ^ theirs):
        where = "not in the checkpoint" if key in mine else "not in the model"
        raise UsageError(f"{path}: {key.split('/', 1)[1]} is {where}; it is of another model or optimizer")
    for key in sorted(mine):
        if saved[key].size != state[key].size():
            name = key.split("/", 1)[1]
            raise UsageError(
                f"{path}: {name} has {list(saved[key].size)} elements, the model's {list(state[key].size())}"
            )


def _on_rank_zero(group: RankGroup, act: Any, what: str) -> Path:
    """Run something on rank 0 and let every rank know how it went, so that nobody waits for a rank that failed."""
    outcome: list[Any] = [None, None]
    if group.rank == 0:
        try:
            outcome = [act(), None]
        except OSError as error:
            outcome = [None, f"{what} failed: {error}"]
    if group.size > 1:
        dist.broadcast_object_list(outcome, src=0, group=group.process_group)
    if outcome[1] is not None:
        raise RunFailed(outcome[1])
    return Path(outcome[0])


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[-1] if text else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of its own deprecated internals here; nothing that a user can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

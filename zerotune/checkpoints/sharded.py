"""Sharded save and load with torch.distributed.checkpoint: every rank writes and reads its own slices."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerotune.checkpoints.flat_slice import FlatSlice
from zerotune.checkpoints.folders import latest, prepare
from zerotune.checkpoints.manifest import Manifest, RankWindow, Weight, Window, read_manifest
from zerotune.checkpoints.random_state import random_states, set_random_states
from zerotune.checkpoints.writing import PendingSave
from zerotune.config.errors import UsageError
from zerotune.engine import RankGroup
from zerotune.engine.meeting import from_rank_zero, meet, on_rank_zero, to_rank_zero, together

State = dict[str, torch.Tensor]


class Checkpointable(Protocol):
    """An engine whose state can be saved in a form that does not depend on the number of ranks.

    Keys are ``model/NAME``, ``buffer/NAME`` and ``optimizer/NAME/STATE``; sliced tensors are
    :class:`~zerotune.checkpoints.flat_slice.FlatSlice`, others are the same on every rank, but for buffers.
    """

    @property
    def group(self) -> RankGroup: ...

    steps: int

    def sharded_state(self) -> State:
        """This rank's part of parameters, buffers and optimizer state; loading writes into these tensors."""

    def expect_optimizer_state(self, found: Mapping[str, Mapping[str, tuple[torch.dtype, bool]]]) -> None:
        """Make room for optimizer state: for each parameter and state key its dtype and whether it is sliced."""

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Settings of the optimizer's groups (lr, betas, …), without the parameters."""

    def set_optimizer_groups(self, groups: list[dict[str, Any]]) -> None:
        """Load what :meth:`optimizer_groups` gave."""

    def optimizer_values(self) -> dict[str, dict[str, Any]]:
        """Optimizer state that is no tensor, by parameter; as JSON."""

    def set_optimizer_values(self, values: dict[str, dict[str, Any]]) -> None:
        """Load what :meth:`optimizer_values` gave."""

    def engine_values(self) -> dict[str, Any]:
        """Small state of the engine that shapes the next step, such as its loss scale; as JSON."""

    def set_engine_values(self, values: dict[str, Any]) -> None:
        """Load what :meth:`engine_values` gave."""

    def window(self) -> tuple[int, RankWindow]:
        """Micro-batches in the open accumulation window, and this rank's part of its sums."""

    def set_window(self, position: int, mine: RankWindow | None, summed: Iterable[str]) -> None:
        """Drop the open window and begin another: empty if ``position`` is 0."""

    def window_gradients(self) -> State:
        """This rank's part of the window's gradient sums, ``gradient/NAME``, and full gradients that it alone holds,
        ``held-gradient/RANK/NAME``; loading writes into these tensors."""

    def weights(self) -> list[Weight]:
        """What the model's ``state_dict()`` holds, and where in the checkpoint each tensor is."""

    def full_parameter(self, name: str) -> torch.Tensor:
        """One parameter, full, fp32, on the CPU; collective."""

    def refresh(self) -> None:
        """Rebuild every derived copy after the masters were written."""

    def flush(self) -> None:
        """Drop everything that is live."""


_UNDER_WAY: WeakKeyDictionary[Checkpointable, PendingSave] = WeakKeyDictionary()


def save(
    engine: Checkpointable, folder: str | Path, step: int, extra: Mapping[str, Any] | None = None
) -> Path:
    """Save an engine's state; a collective call.

    Args:
        engine: What to save, between two micro-batches. What it has summed of an open accumulation window is saved too.
        folder: Folder of checkpoints, on storage that all ranks share; this one is published in it as
            ``step-00000042``.
        step: Optimizer steps taken so far.
        extra: More to keep with it, as JSON.

    Returns:
        Path of the published checkpoint.

    Raises:
        RunFailed: It could not be written; every rank raises.
    """
    return _begin(engine, Path(folder), step, extra, in_background=False).wait()


def begin_save(
    engine: Checkpointable, folder: str | Path, step: int, extra: Mapping[str, Any] | None = None
) -> PendingSave:
    """As :func:`save`, but write in the background, from copies: the engine may be used at once.

    It costs the memory of a copy of this rank's part, on the CPU. Only one save of an engine is under way at a time:
    the next one waits for it, and raises what went wrong with it. It is published as soon as all ranks have written;
    :meth:`PendingSave.wait`, which is collective, says how it went.
    """
    return _begin(engine, Path(folder), step, extra, in_background=True)


def finish_save(engine: Checkpointable) -> Path | None:
    """Wait for the save that is under way; a collective call.

    Returns:
        Path of the checkpoint, or ``None`` if none was under way.

    Raises:
        RunFailed: It could not be written; every rank raises.
    """
    pending = _UNDER_WAY.pop(engine, None)
    return None if pending is None else pending.wait()


def abandon_save(engine: Checkpointable) -> None:
    """End a save that is under way after an error, without a word to the other ranks."""
    pending = _UNDER_WAY.pop(engine, None)
    if pending is not None:
        pending.abandon()


def _begin(
    engine: Checkpointable, folder: Path, step: int, extra: Mapping[str, Any] | None, in_background: bool
) -> PendingSave:
    finish_save(engine)
    group = engine.group
    meet(group, f"saving step {step}")
    what = f"checkpoint of step {step} in {folder}"
    aside = on_rank_zero(group, what, lambda: prepare(folder, step))
    writer = dcp.FileSystemWriter(str(aside))
    planner = DefaultSavePlanner()
    position, mine = together(group, what, engine.window)
    state = together(group, what, lambda: _state_to_save(engine, position > 0, in_background))
    _add_own_buffers(state, group)

    def plan_own() -> dcp.SavePlan:
        writer.set_up_storage_writer(group.rank == 0)
        planner.set_up_planner(state, writer.storage_meta(), group.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = to_rank_zero(group, together(group, what, plan_own))
    windows = to_rank_zero(group, mine)

    metadata = manifest = None

    def plan_all() -> None:
        nonlocal metadata, manifest, plans
        assert plans is not None and windows is not None
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
        manifest = _manifest(engine, step, extra, position, windows, state)
        manifest.to_json()

    on_rank_zero(group, what, plan_all)
    plan = planner.finish_plan(from_rank_zero(group, plans))
    pending = PendingSave(group, folder, step, writer, plan, planner, metadata, manifest)
    _UNDER_WAY[engine] = pending
    pending.start(in_background)
    if not in_background:
        _UNDER_WAY.pop(engine)
    return pending


def _state_to_save(engine: Checkpointable, in_window: bool, copied: bool) -> State:
    state = engine.sharded_state()
    if in_window:
        state.update(engine.window_gradients())
    # Nothing is written of a tensor without elements, and nothing is read.
    state = {key: value for key, value in state.items() if _numel(value)}
    if copied:
        state = {key: _copy(value) for key, value in state.items()}
    state.update(random_states(engine.group))
    return state


def _numel(value: torch.Tensor) -> int:
    return value.total if isinstance(value, FlatSlice) else value.numel()


def _copy(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, FlatSlice):
        return FlatSlice.of(value.local.to("cpu", copy=True), value.offset, value.total)
    return value.detach().to("cpu", copy=True)


def _add_own_buffers(state: State, group: RankGroup) -> None:
    """Keep each rank's buffers where they differ from rank 0's, which are the model's.

    Running statistics, for one, are those of a rank's own samples.
    """
    if group.size == 1:
        return
    mine = {key: _hash(value) for key, value in state.items() if key.startswith("buffer/")}
    theirs = on_rank_zero(group, "comparing buffers", lambda: mine)
    for key in mine:
        if group.rank and theirs.get(key) != mine[key]:
            state[own_buffer(key, group.rank)] = state[key]
        if group.rank:
            del state[key]


def own_buffer(key: str, rank: int) -> str:
    """Key of a rank's own value of a buffer."""
    return f"{key}@{rank}"


def _hash(value: torch.Tensor) -> str:
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha1(content.numpy().tobytes(), usedforsecurity=False).hexdigest()


def _manifest(
    engine: Checkpointable,
    step: int,
    extra: Mapping[str, Any] | None,
    position: int,
    windows: list[RankWindow],
    state: State,
) -> Manifest:
    summed = [key.removeprefix("gradient/") for key in state if key.startswith("gradient/")]
    return Manifest(
        step=step,
        ranks=engine.group.size,
        optimizer_groups=engine.optimizer_groups(),
        optimizer_values=engine.optimizer_values(),
        engine_values=engine.engine_values(),
        window=Window(position=position, ranks=windows, summed=summed) if position else None,
        weights=engine.weights(),
        extra=dict(extra or {}),
    )


# ---------------------------------------------------------------------------------------------------- loading


def load(
    engine: Checkpointable, folder: str | Path, restart_window: bool = False
) -> tuple[int, dict[str, Any]]:
    """Load the newest complete checkpoint in a folder (or the one named); a collective call.

    It may have been saved by another number of ranks and at another stage. Random states are restored where this
    rank saved one.

    Args:
        engine: What to load into; whatever it held is gone.
        folder: Folder of checkpoints, or one of them.
        restart_window: Drop the open accumulation window of a checkpoint that has one, and go back to its first
            micro-batch. Needed on another number of ranks, which share out micro-batches in another way.

    Returns:
        The step it was saved after, and what was kept with it.

    Raises:
        UsageError: There is none, or it is of another model, or it was saved inside an accumulation window by another
            number of ranks.
        RunFailed: It could not be read. The engine's state is then neither the old nor the new one.
    """
    finish_save(engine)
    group = engine.group
    meet(group, "loading")
    what = f"loading a checkpoint from {folder}"
    path, manifest = on_rank_zero(group, what, lambda: _find(Path(folder)))
    window = None if restart_window else manifest.window
    if window is not None and manifest.ranks != group.size:
        raise UsageError(
            f"{path} was saved by {manifest.ranks} ranks inside an accumulation window, after micro-batch "
            f"{window.position} of step {manifest.step}; here are {group.size} ranks",
            f"load it with restart_window=True and repeat step {manifest.step} from its first micro-batch",
        )
    together(group, what, lambda: _read(engine, path, manifest, window))
    engine.refresh()
    return manifest.step, manifest.extra


def _find(folder: Path) -> tuple[Path, Manifest]:
    path = latest(folder)
    return path, read_manifest(path)


def _read(engine: Checkpointable, path: Path, manifest: Manifest, window: Window | None) -> None:
    engine.flush()
    group = engine.group
    reader = dcp.FileSystemReader(str(path))
    saved = reader.read_metadata().state_dict_metadata
    _compare(engine.sharded_state(), saved, path, ("model/", "buffer/"))
    engine.expect_optimizer_state(_optimizer_state_in(saved))
    state = {key: value for key, value in engine.sharded_state().items() if _numel(value)}
    _compare(state, saved, path, ("optimizer/",))
    if manifest.ranks == group.size:
        for key in [key for key in state if own_buffer(key, group.rank) in saved]:
            state[own_buffer(key, group.rank)] = state.pop(key)
    mine = None if window is None else window.ranks[group.rank]
    engine.set_window(window.position if window else 0, mine, window.summed if window else ())
    if window is not None:
        state.update({key: value for key, value in engine.window_gradients().items() if _numel(value)})
    random = {key: torch.zeros_like(value) for key, value in random_states(group).items() if key in saved}
    state.update(random)
    with _quiet():
        # Each rank reads for itself: which pieces it needs is in the metadata.
        dcp.load(state, storage_reader=reader, no_dist=True)
    set_random_states(group, random)
    engine.set_optimizer_groups(manifest.optimizer_groups)
    engine.set_optimizer_values(manifest.optimizer_values)
    engine.set_engine_values(manifest.engine_values)
    engine.steps = manifest.step


def _optimizer_state_in(saved: Mapping[str, Any]) -> dict[str, dict[str, tuple[torch.dtype, bool]]]:
    found: dict[str, dict[str, tuple[torch.dtype, bool]]] = {}
    for key, metadata in saved.items():
        if key.startswith("optimizer/") and isinstance(metadata, TensorStorageMetadata):
            name, state = key.removeprefix("optimizer/").rsplit("/", 1)
            found.setdefault(name, {})[state] = (metadata.properties.dtype, len(metadata.size) == 1)
    return found


def _compare(state: State, saved: Mapping[str, Any], path: Path, kinds: tuple[str, ...]) -> None:
    mine = {key for key, value in state.items() if key.startswith(kinds) and _numel(value)}
    theirs = {key for key in saved if key.startswith(kinds) and "@" not in key}
    for key in sorted(mine ^ theirs):
        where = "not in the checkpoint" if key in mine else "not in the model"
        raise UsageError(f"{path}: {key.split('/', 1)[1]} is {where}; it is of another model or optimizer")
    for key in sorted(mine):
        if saved[key].size != state[key].size():
            name = key.split("/", 1)[1]
            raise UsageError(
                f"{path}: {name} has {list(saved[key].size)} elements, the model's {list(state[key].size())}"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of its own deprecated internals here; nothing that a user can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

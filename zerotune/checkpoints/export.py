"""Plain weights: what the model itself would have saved, without ranks, padding or optimizer, as one safetensors file.

Tied weights are written once, under their first name. The header's metadata names the others, ``{other: first}``, as
the safetensors library's own ``save_model`` does; :func:`read_weights` and ``safetensors.torch.load_model`` restore
the tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerotune.checkpoints.folders import latest
from zerotune.checkpoints.manifest import Weight, read_manifest
from zerotune.checkpoints.safetensors_file import Entry, SafetensorsWriter
from zerotune.checkpoints.sharded import Checkpointable
from zerotune.config.errors import RunFailed, UsageError, ZerotuneError
from zerotune.engine.meeting import first_line, meet, on_rank_zero

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def export_weights(
    source: Checkpointable | str | Path, path: str | Path, dtype: torch.dtype | str | None = None
) -> Path:
    """Write a model's weights and persistent buffers as the plain model would have saved them.

    Of a checkpoint it needs neither ranks nor the model; of an engine it is a collective call, and rank 0 writes. It
    holds one full parameter at a time.

    Args:
        source: A checkpoint, a folder of checkpoints (the newest complete one counts), or an engine.
        path: The file to write; it appears when it is complete.
        dtype: Of floating-point tensors, as torch's or one of ``fp32``, ``bf16``, ``fp16``, ``fp64``. Default: that of
            the master weights, fp32, and of each buffer its own.

    Returns:
        ``path``.

    Raises:
        UsageError: There is no checkpoint, the dtype is unknown, or the file cannot be written.
        RunFailed: It failed on the way; every rank raises.
    """
    path = Path(path)
    wanted = _dtype(dtype)
    if isinstance(source, (str, Path)):
        _export_checkpoint(latest(Path(source)), path, wanted)
    else:
        _export_engine(source, path, wanted)
    return path


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Read what :func:`export_weights` wrote, as the plain model's ``state_dict()``: tied names share one tensor."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        for name, first in (file.metadata() or {}).items():
            if first in state and name not in state:
                state[name] = state[first]
    return state


def _export_checkpoint(checkpoint: Path, path: Path, dtype: torch.dtype | None) -> None:
    manifest = read_manifest(checkpoint)
    kept = _kept(manifest.weights, dtype)
    read = _reader(checkpoint)
    try:
        with _writer(path, manifest.weights, kept, dtype) as writer:
            for weight in kept:
                writer.write(read(weight))
            writer.commit()
    except ZerotuneError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}", "choose another file") from error
    except Exception as error:
        raise RunFailed(f"exporting {checkpoint} to {path} failed: {first_line(error)}") from error


def _reader(checkpoint: Path) -> Callable[[Weight], torch.Tensor]:
    """Reads full tensors of a checkpoint, one by one."""
    reader = dcp.FileSystemReader(str(checkpoint))
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)

    def read(weight: Weight) -> torch.Tensor:
        full = torch.empty(weight.shape, dtype=getattr(torch, weight.dtype))
        if full.numel() == 0:
            return full
        assert weight.key is not None
        # Parameters are saved flattened, buffers in their own shape.
        saved = metadata.state_dict_metadata[weight.key]
        assert isinstance(saved, TensorStorageMetadata)
        target = full.view(saved.size)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({weight.key: target}, metadata, True)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        return full

    return read


def _export_engine(engine: Checkpointable, path: Path, dtype: torch.dtype | None) -> None:
    group = engine.group
    meet(group, "exporting weights")
    engine.flush()
    what = f"export to {path}"
    weights = engine.weights()
    kept = _kept(weights, dtype)
    buffers = {key: value for key, value in engine.sharded_state().items() if key.startswith("buffer/")}
    writer: SafetensorsWriter | None = None

    def open_file() -> None:
        nonlocal writer
        writer = _writer(path, weights, kept, dtype)

    on_rank_zero(group, what, open_file)
    try:
        for weight in kept:
            assert weight.key is not None
            is_buffer = weight.key.startswith("buffer/")
            full = (
                buffers[weight.key] if is_buffer else engine.full_parameter(weight.key.removeprefix("model/"))
            )

            def write(full: torch.Tensor = full) -> None:
                assert writer is not None
                writer.write(full)

            on_rank_zero(group, what, write)

        def commit() -> None:
            assert writer is not None
            writer.commit()

        on_rank_zero(group, what, commit)
    except BaseException as error:
        if writer is not None:
            writer.__exit__(type(error), error, None)
        raise
    if writer is not None:
        writer.__exit__(None, None, None)


def _kept(weights: Sequence[Weight], dtype: torch.dtype | None) -> list[Weight]:
    """What is written: each tensor once, those of wide elements first, so that every one is aligned."""
    once = [weight for weight in weights if weight.same_as is None]
    return sorted(once, key=lambda weight: -_file_dtype(weight, dtype).itemsize)


def _writer(
    path: Path, weights: Sequence[Weight], kept: Sequence[Weight], dtype: torch.dtype | None
) -> SafetensorsWriter:
    if path.is_dir():
        raise UsageError(f"{path} is a folder", f"name a file, such as {path / 'model.safetensors'}")
    entries = [Entry(weight.name, weight.shape, _file_dtype(weight, dtype)) for weight in kept]
    try:
        return SafetensorsWriter(path, entries, {w.name: w.same_as for w in weights if w.same_as is not None})
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "choose another file") from None


def _file_dtype(weight: Weight, dtype: torch.dtype | None) -> torch.dtype:
    own: torch.dtype = getattr(torch, weight.dtype)
    return dtype if dtype is not None and own.is_floating_point else own


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise UsageError(
            f"{dtype} is no dtype that weights can be exported in", f"take one of {', '.join(DTYPES)}"
        )
    return DTYPES[dtype]

"""What ranks do in the tests of building: deferred, from the meta device, from files."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerotune
from tests.zero.jobs import make_model
from zerotune.config.errors import UsageError
from zerotune.config.schema import GptConfig
from zerotune.models.gpt import Gpt
from zerotune.zero.engine import ZeroEngine

State = dict[str, torch.Tensor]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def _engine(module: nn.Module, stage: int, precision: Any = "fp32", **options: Any) -> ZeroEngine:
    knobs = zerotune.Knobs(stage=stage, param_persistence_threshold=500)
    return ZeroEngine(module, knobs=knobs, precision=precision, **options)


def deferred_and_ordinary(
    rank: int, size: int, model: str, stage: int, precision: str
) -> tuple[State, State]:
    """The state of an engine whose model was built deferred, with another seed on each rank, and of an ordinary one."""
    states = []
    for is_deferred in (True, False):
        torch.manual_seed(7 + rank)
        if is_deferred:
            with zerotune.deferred():
                module = make_model(model)
        else:
            module = make_model(model)
        engine = _engine(module, stage, precision)
        states.append(engine.full_state_dict())
        engine.close()
    return states[0], states[1]


def own_optimizer(rank: int, size: int) -> State:
    """An optimizer built on a deferred model's parameters, one step, as a user's loop would."""
    torch.manual_seed(7)
    with zerotune.deferred():
        module = make_model("gpt")
    engine = ZeroEngine(module, torch.optim.SGD(module.parameters(), lr=0.1))
    tokens = torch.arange(8).view(1, 8) + rank
    engine.backward(engine(tokens).square().mean())
    engine.step()
    state = engine.full_state_dict()
    engine.close()
    return state


def from_files(rank: int, size: int, path: str, stage: int, precision: str, on_meta: bool) -> State:
    """A model of which every value comes from files."""
    torch.manual_seed(100 + rank)
    with torch.device("meta") if on_meta else zerotune.deferred():
        module = make_model("tied_gpt")
    engine = _engine(module, stage, precision, weights=path)
    state = engine.full_state_dict()
    tokens = torch.arange(8).view(1, 8)
    engine.backward(engine(tokens).square().mean())
    engine.step()
    engine.close()
    return state


def loaded_later(rank: int, size: int, path: str, stage: int, strict: bool) -> State:
    """Files loaded into an engine that has trained."""
    torch.manual_seed(3)
    engine = _engine(make_model("tied_gpt"), stage)
    tokens = torch.arange(8).view(1, 8)
    engine.backward(engine(tokens).square().mean())
    engine.step()
    engine.load_weights(path, strict)
    state = engine.full_state_dict()
    engine.close()
    return state


def loading_error(rank: int, size: int, path: str, others: str | None = None) -> str:
    """What is said of files that do not fit; ``others`` is the path on the ranks but 0."""
    module = make_model("tied_gpt")
    try:
        _engine(module, 3, weights=path if rank == 0 or others is None else others)
    except UsageError as error:
        return str(error)
    return "no error"


def meta_without_values(rank: int, size: int) -> str:
    with torch.device("meta"):
        module = make_model("gpt")
    try:
        ZeroEngine(module)
    except UsageError as error:
        return str(error)
    return "no error"


@dataclass
class Peak:
    """Bytes: the process's peak above what it held before, and what the bound is made of."""

    peak: int
    shards: int
    largest_unit: int
    parameters: int


def peak_of_build(rank: int, size: int) -> Peak:
    """Build a GPT of 40 M parameters deferred, and partition it, watching the process's resident memory."""
    # Freed memory goes back at once, or the process's resident memory would be glibc's and not ours.
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, 64 * 1024)
    config = GptConfig(layers=10, d_model=512, heads=8, vocab_size=8192, sequence_length=128)
    _build(config)  # once before, so that what is only loaded at the first use (code, above all) is there
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    shards, largest, parameters = _build(config)
    return Peak(_resident("VmHWM") - before, shards, largest, parameters)


def _build(config: GptConfig) -> tuple[int, int, int]:
    with zerotune.deferred():
        module = Gpt(config)
    engine = ZeroEngine(module, knobs=zerotune.Knobs(stage=3, param_persistence_threshold=0))
    shards = sum(param.master.nbytes for param in engine.shards.params)
    largest = max(sum(p.numel for p in unit.params) for unit in engine.shards.units) * 4
    parameters = sum(param.numel for param in engine.shards.params)
    engine.close()
    return shards, largest, parameters


def _resident(key: str) -> int:
    """A line of the process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

"""Building a model whose parameters take no memory until somebody asks for one, with the values it would have had.

Inside :func:`deferred` a constructor runs as it always does: every operation is executed, draws its random numbers, and
sees real values. But what large tensors went through is written down, and the memory of those that become parameters is
given back as soon as the next operation touches something else. A parameter's values come back by doing again what made
it, with the random generator as it was: bit for bit those of an ordinary build. So the peak is the parameters of one
operation, and a parameter that is initialised twice (by its own class, then by the model) is made again only the second
way.

[Note: what stays in memory]
Buffers, small parameters (:data:`SMALL_BYTES`), and parameters that the constructor handed to something that reads
memory without an operation of torch (``numpy()``, ``data_ptr()``, pickling): these keep their values as in an ordinary
build.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from zerotune.config.errors import UsageError
from zerotune.models.access import is_wrapper, make_partitioned, make_plain
from zerotune.models.uses import tensors_in

SMALL_BYTES = 1 << 14
"""Tensors below this many bytes are not worth it: writing down what made them takes as much."""

_OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in ("normal", "uniform", "zero", "fill", "copy", "random", "exponential", "log_normal", "cauchy")
)
"""In-place operations whose result does not depend on what was there before."""

_READS_MEMORY = frozenset(
    {
        *("numpy", "__array__", "tolist", "data_ptr", "__dlpack__", "share_memory_"),
        *("storage", "untyped_storage", "_typed_storage", "__reduce_ex__", "__deepcopy__"),
    }
)
"""Methods of tensors that hand out memory past the dispatcher."""

_REMEDY = "build the model within zerotune.deferred(), or give the engine weights to load"

_OWNER = "_zerotune_deferred"
"""Attribute of a parameter without memory: the :class:`Deferred` that knows its values."""


@dataclass(eq=False)
class _Step:
    """An operation that was executed, and can be again.

    Attributes:
        index: Its place in the order of all.
        run: Executes it on tensors that :class:`_Place` stand for.
        before: The operations that made what it reads.
    """

    index: int
    run: Callable[[Callable[[_Place], torch.Tensor]], None]
    before: tuple[_Step, ...]


@dataclass(eq=False)
class _History:
    """What a storage went through.

    Attributes:
        nbytes: Its size while it has memory.
        device: Where.
        storage: The storage itself, weakly.
        last: The last operation that wrote it; through it, all that matter.
        may_be_freed: Whether it belongs to a parameter and nobody looks at its memory directly.
        is_freed: Whether it has no memory now.
    """

    nbytes: int
    device: torch.device
    storage: StorageWeakRef
    last: _Step | None = None
    may_be_freed: bool = False
    is_freed: bool = False

    def resize(self, is_full: bool) -> None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is not None:
            storage.resize_(self.nbytes if is_full else 0)
        self.is_freed = not is_full


@dataclass(frozen=True)
class _Place:
    """A tensor over a storage with a history."""

    history: _History
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Deferred:
    """The values of a parameter that has no memory.

    Attributes:
        restore: Gives it memory and, unless told not to, its values.
        free: Takes the memory away again.
    """

    restore: Callable[[bool], None]
    free: Callable[[], None]


@contextmanager
def deferred() -> Iterator[None]:
    """Inside it, modules are built without keeping memory for their parameters.

    Hand the model to :class:`zerotune.ZeroEngine`, which makes one parameter at a time and keeps this rank's slice::

        with zerotune.deferred():
            model = build()
        engine = zerotune.ZeroEngine(model)

    The values are those of an ordinary build with the same seed, see [Note: what stays in memory]. Reading a parameter
    before an engine has it raises :class:`UsageError`.
    """
    recorder = _Recorder()
    built: dict[int, nn.Parameter] = {}

    def note(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            built[id(param)] = param
            recorder.may_free(param)

    def note_all(module: nn.Module, name: str, child: nn.Module | None) -> None:
        for param in (
            child.parameters() if child is not None else ()
        ):  # a copied module registers none of its own
            note(module, name, param)

    handles = (
        register_module_parameter_registration_hook(note),
        register_module_module_registration_hook(note_all),
    )
    try:
        with _MemoryReads(recorder), recorder:
            yield
    finally:
        for handle in handles:
            handle.remove()
        for param in built.values():
            recorder.may_free(param)  # its data may have been assigned since
        recorder.free_all_but(())
        for param in built.values():
            recorder.hand_over(param)


def is_deferred(param: nn.Parameter) -> bool:
    """Whether a parameter has no memory yet."""
    return hasattr(param, _OWNER)


@contextmanager
def values_of(param: nn.Parameter, *, make: bool = True) -> Iterator[torch.Tensor]:
    """The parameter's values, in its shape; a deferred one has memory inside only.

    Args:
        param: Any parameter.
        make: Whether a deferred one gets its values; otherwise the memory holds anything, to be written.
    """
    owner: Deferred | None = getattr(param, _OWNER, None)
    if owner is None:
        yield param.detach()
        return
    owner.restore(make)
    try:
        with torch._C.DisableTorchFunctionSubclass():
            yield param.detach()
    finally:
        owner.free()


def fill(module: nn.Module) -> None:
    """Give every deferred parameter its values for good: from then on the module is as an ordinary build leaves it."""
    for param in module.parameters():
        owner: Deferred | None = getattr(param, _OWNER, None)
        if owner is not None:
            owner.restore(True)
            take_over(param)


def take_over(param: nn.Parameter) -> None:
    """The parameter gets its memory from elsewhere: forget how its values were made."""
    if is_deferred(param):
        delattr(param, _OWNER)
        make_plain(param)


def leave_meta(module: nn.Module, device: torch.device, loaded: Collection[str] = ()) -> None:
    """Make parameters on the meta device deferred ones, the same objects: they have no values, only room for them.

    Args:
        module: The model.
        device: Where they get memory, and where buffers do now.
        loaded: Names of the parameters and buffers that will be loaded: others have no values to train with.

    Raises:
        UsageError: A parameter or buffer on the meta device will not be loaded.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if param.device.type == "meta":
            names.setdefault(param, []).append(name)
    for param, own_names in names.items():
        if not any(name in loaded for name in own_names):
            raise UsageError(f"{own_names[0]} was built on the meta device: it has no values", _REMEDY)
        _give_room(param, own_names[0], device)
    for prefix, submodule in module.named_modules():
        for local, buffer in submodule._buffers.items():
            if buffer is None or buffer.device.type != "meta":
                continue
            name = f"{prefix}.{local}" if prefix else local
            if name not in loaded:
                raise UsageError(f"the buffer {name} was built on the meta device: it has no values", _REMEDY)
            submodule._buffers[local] = torch.empty_like(buffer, device=device)


def _give_room(param: nn.Parameter, name: str, device: torch.device) -> None:
    room = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device)
    storage, nbytes = room.untyped_storage(), room.untyped_storage().nbytes()
    storage.resize_(0)
    landed = nn.Parameter(room, requires_grad=param.requires_grad)
    landed.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, landed)

    def restore(make: bool) -> None:
        assert not make, "it is loaded, not made"
        storage.resize_(nbytes)

    why = f"{name} was built on the meta device: it has no values yet"
    _defer(param, Deferred(restore, lambda: storage.resize_(0)), why)


def _defer(param: nn.Parameter, owner: Deferred, why: str) -> None:
    """Mark a parameter whose storage is empty; reading it raises :class:`UsageError` with the text ``why``."""

    def refuse() -> None:
        raise UsageError(why, "hand the model to zerotune.ZeroEngine first")

    setattr(param, _OWNER, owner)
    make_partitioned(param, refuse)


class _MemoryReads(TorchFunctionMode):
    """Whoever looks at memory directly finds it filled, and it stays."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _READS_MEMORY:
            for tensor in tensors_in((args, kwargs)):
                self._recorder.keep(tensor)
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    """Executes operations, writes down those on large tensors, and frees parameters between them."""

    def __init__(self) -> None:
        super().__init__()
        self._histories: dict[int, _History] = {}
        self._filled: dict[_History, None] = {}  # those that may be freed, and are not
        self._count = 0

    # -------------------------------------------------------------------------------------------- for parameters

    def may_free(self, param: nn.Parameter) -> None:
        """The memory of a parameter need not stay, if it is known how to make its values."""
        with torch._C.DisableTorchFunction():
            history = self._history(param)
            if history is not None and not history.may_be_freed and _size(param) == history.nbytes:
                history.may_be_freed = True
                self._filled[history] = None

    def keep(self, tensor: torch.Tensor) -> None:
        """Somebody looks at this tensor's memory."""
        with torch._C.DisableTorchFunction():
            history = self._history(tensor)
            if history is not None:
                self._fill(history)
                history.may_be_freed = False
                self._filled.pop(history, None)
                # It may be written past the dispatcher, so that its history no longer makes its values.
                self._histories.pop(tensor.untyped_storage()._cdata)

    def hand_over(self, param: nn.Parameter) -> None:
        """The model is built: a parameter without memory is made by :func:`values_of` from now on."""
        history = self._history(param)
        if history is None or not history.is_freed:
            return

        def restore(make: bool) -> None:
            if make:
                self._fill(history)
            else:
                history.resize(is_full=True)

        def free() -> None:
            self._filled.pop(history, None)
            history.resize(is_full=False)

        shape = tuple(param.shape)
        _defer(
            param,
            Deferred(restore, free),
            f"a parameter of shape {shape} was built deferred: it has no values yet",
        )

    def free_all_but(self, used: tuple[_History, ...]) -> None:
        """Free what may be freed, except what the latest operation used, which the next one may well use too."""
        for history in [h for h in self._filled if h not in used]:
            del self._filled[history]
            history.resize(is_full=False)

    # -------------------------------------------------------------------------------------------- for operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = [t for t in tensors_in((args, kwargs)) if _is_plain(t)]
        histories = {t.untyped_storage()._cdata: h for t in operands if (h := self._history(t)) is not None}
        written = {
            t.untyped_storage()._cdata for t in _written(func, args, kwargs) if _is_plain(t)
        } & histories.keys()
        overwritten = self._overwritten(func, operands, histories) & written
        for place, history in histories.items():
            if history.is_freed:
                if place in overwritten:
                    history.resize(is_full=True)
                    self._filled[history] = None
                else:
                    self._fill(history)
        self.free_all_but(tuple(histories.values()))
        if torch.Tag.inplace_view in func.tags or func._schema.name in ("aten::set_", "aten::resize_"):
            for tensor in operands:
                self.keep(tensor)  # a storage that changes its size or its owner
            return func(*args, **kwargs)
        if _only_makes_views(func):
            return func(*args, **kwargs)

        call = tree_map_only(torch.Tensor, self._operand, (args, kwargs))
        random = _generator_state(func, operands, kwargs)
        result = func(*args, **kwargs)
        inputs = {t.untyped_storage()._cdata for t in operands}
        made = [
            t
            for t in tensors_in(result)
            if _is_plain(t) and t.untyped_storage()._cdata not in inputs and _size(t) >= SMALL_BYTES
        ]
        if written or made:
            before = tuple(
                h.last for place, h in histories.items() if place not in overwritten and h.last is not None
            )
            for tensor in made:
                storage = tensor.untyped_storage()
                self._histories[storage._cdata] = _History(
                    storage.nbytes(), tensor.device, StorageWeakRef(storage)
                )
            outputs = [
                self._place(t) if _is_plain(t) and t.untyped_storage()._cdata in _places(made) else None
                for t in tensors_in(result)
            ]
            step = _Step(self._count, _replay(func, call, random, outputs), before)
            self._count += 1
            for place in written | _places(made):
                self._histories[place].last = step
        return result

    def _overwritten(
        self, func: Any, operands: list[torch.Tensor], histories: dict[int, _History]
    ) -> set[int]:
        """The storage that the operation fills without having read it, if any."""
        if func._schema.name not in _OVERWRITES or not operands:
            return set()
        target = operands[0]
        place = target.untyped_storage()._cdata
        history = histories.get(place)
        covers = history is not None and _size(target) == history.nbytes and target.is_contiguous()
        reads_itself = any(t.untyped_storage()._cdata == place for t in operands[1:])
        return {place} if covers and not reads_itself else set()

    def _history(self, tensor: torch.Tensor) -> _History | None:
        return self._histories.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None

    def _place(self, tensor: torch.Tensor) -> _Place:
        history = self._histories[tensor.untyped_storage()._cdata]
        return _Place(
            history, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        )

    def _operand(self, tensor: torch.Tensor) -> Any:
        """What a step remembers of a tensor that it is given: where it is, or a copy if that has no history."""
        if self._history(tensor) is not None:
            return self._place(tensor)
        return tensor.detach().clone() if _is_plain(tensor) else tensor

    def _fill(self, wanted: _History) -> None:
        """Give a freed storage its values again."""
        if not wanted.is_freed:
            return
        wanted.resize(is_full=True)
        if wanted.may_be_freed:
            self._filled[wanted] = None
        storages: dict[_History, torch.UntypedStorage] = {
            wanted: torch.UntypedStorage._new_with_weak_ptr(wanted.storage.cdata)
        }

        def tensor_at(place: _Place) -> torch.Tensor:
            history = place.history
            if history not in storages:
                storages[history] = torch.UntypedStorage(history.nbytes, device=history.device)
            empty = torch.empty(0, dtype=place.dtype, device=history.device)
            return empty.set_(storages[history], place.offset, place.size, place.stride)

        for step in _all_before(wanted.last):
            step.run(tensor_at)


def _all_before(last: _Step | None) -> list[_Step]:
    """A step and all that it depends on, in the order in which they ran."""
    found: dict[_Step, None] = {}
    open_steps = [last] if last is not None else []
    while open_steps:
        step = open_steps.pop()
        if step not in found:
            found[step] = None
            open_steps.extend(step.before)
    return sorted(found, key=lambda step: step.index)


@dataclass(frozen=True)
class _Random:
    """A generator, and the state in which an operation found it."""

    generator: torch.Generator
    state: torch.Tensor = field(repr=False)

    @contextmanager
    def again(self) -> Iterator[None]:
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(now)


def _replay(
    func: Any, call: Any, random: _Random | None, outputs: list[_Place | None]
) -> Callable[[Callable[[_Place], torch.Tensor]], None]:
    def run(tensor_at: Callable[[_Place], torch.Tensor]) -> None:
        with torch.no_grad():
            # Copies that were kept are copied again: the operation may write into them.
            args, kwargs = tree_map_only(torch.Tensor, torch.clone, call)
            args, kwargs = tree_map_only(_Place, tensor_at, (args, kwargs))
            if random is None:
                result = func(*args, **kwargs)
            else:
                with random.again():
                    result = func(*args, **kwargs)
            for place, tensor in zip(outputs, tensors_in(result), strict=True):
                if place is not None:
                    tensor_at(place).copy_(tensor)

    return run


def _generator_state(func: Any, operands: list[torch.Tensor], kwargs: Any) -> _Random | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator")
    if generator is None:
        device = torch.device(kwargs.get("device") or (operands[0].device if operands else "cpu"))
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        else:
            generator = torch.default_generator
    return _Random(generator, generator.get_state())


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The operands that an operation writes, by its schema."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def _only_makes_views(func: Any) -> bool:
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return is_view and func._schema.name != "aten::lift_fresh"


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not is_wrapper(type(tensor))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _places(tensors: list[torch.Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors}

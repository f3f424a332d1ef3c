"""Noticing who reads a parameter, whatever way: the net under the hooks.

Two nets of different mesh. :class:`PartitionedParameter` is always there: a call of torch that is given the parameter
itself is reported before it runs, wherever it stands; otherwise ``print(model.head.weight)`` between two steps would
read freed memory. :class:`AccessWatch` also sees views of a parameter and what C++ reads in backward. It costs some
microseconds for every operation, and is active only in passes that follow no recorded order; what it finds becomes part
of the recorded order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerotune.config.errors import UsageError
from zerotune.models.marks import ENGINE, mark
from zerotune.models.uses import tensors_in


class AccessWatch(TorchDispatchMode):
    """Reports operands that are managed parameters, or views of them.

    Args:
        owners: Index of the unit that owns a storage, by the storage's identity.
        report: Told of a unit before an operation reads it.
    """

    def __init__(self, owners: Mapping[int, int], report: Callable[[int], None]) -> None:
        super().__init__()
        self._owners = owners
        self._report = report

    @classmethod
    def is_infra_mode(cls) -> bool:
        """It changes nothing, so that ``torch.compile`` need not refuse to compile under it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Views count as reads: torch refuses to make one of a storage that is empty.
        for tensor in tensors_in((args, kwargs)):
            if tensor.layout is torch.strided and not is_wrapper(type(tensor)):
                unit = self._owners.get(tensor.untyped_storage()._cdata)
                if unit is not None:
                    with mark(ENGINE):
                        self._report(unit)
        return func(*args, **kwargs)


class PartitionedParameter(nn.Parameter):
    """A parameter whose storage may be empty: whoever reads it is reported first.

    It is the module's own parameter with another class, so that identity, hooks and optimizers stay what they were.
    """

    def on_read(self) -> None:
        """What a read is reported to; a copy has nobody to report to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and reads_values(func):
            for tensor in tensors_in((args, kwargs)):
                if issubclass(type(tensor), PartitionedParameter):  # isinstance() of a Parameter is slow
                    with mark(ENGINE):
                        tensor.on_read()  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, **options: Any) -> Any:  # type: ignore[override]
        if not self.numel() or self.untyped_storage().nbytes():
            # The memory may be there before its values are: then reading it is refused.
            with contextlib.suppress(UsageError):
                return super().__repr__(**options)
        return f"Parameter(shape={tuple(self.shape)}, dtype={self.dtype}, partitioned)"


not_reading = torch._C.DisableTorchFunctionSubclass
"""Context of the engine's own dealings with parameters, which need not be looked at."""


def make_partitioned(param: nn.Parameter, on_read: Callable[[], None]) -> None:
    """Report reads of a parameter from now on."""
    plain = type(param)
    param.__class__ = PartitionedParameter if plain is nn.Parameter else _partitioned(plain)
    assert isinstance(param, PartitionedParameter)
    param.on_read = on_read  # type: ignore[method-assign]


def make_plain(param: nn.Parameter) -> None:
    """Undo :func:`make_partitioned`."""
    if isinstance(param, PartitionedParameter):
        plain = plain_class(param)
        del param.on_read
        param.__class__ = plain  # type: ignore[assignment]


def plain_class(param: nn.Parameter) -> type[nn.Parameter]:
    """The class that a partitioned parameter had before; with it as ``__class__`` reads are not reported, and cost nothing."""
    mro = type(param).__mro__
    return next(c for c in mro if issubclass(c, nn.Parameter) and not issubclass(c, PartitionedParameter))


@cache
def _partitioned(plain: type[nn.Parameter]) -> type[PartitionedParameter]:
    """The class for a parameter of a class of the user's."""
    return type(f"Partitioned{plain.__name__}", (PartitionedParameter, plain), {})


@cache
def is_wrapper(tensor_class: type) -> bool:
    """Whether tensors of a class hold their values elsewhere (``DTensor``, quantised ones)."""
    return (
        getattr(tensor_class, "__torch_dispatch__", torch._C._disabled_torch_dispatch_impl)
        is not torch._C._disabled_torch_dispatch_impl
    )


_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes through which values can be read."""

_METADATA = frozenset(
    {
        *(
            "__hash__",
            "__len__",
            "dim",
            "ndimension",
            "size",
            "numel",
            "nelement",
            "stride",
            "storage_offset",
        ),
        *(
            "is_contiguous",
            "element_size",
            "get_device",
            "untyped_storage",
            "is_floating_point",
            "is_complex",
        ),
        *("is_signed", "is_shared", "is_set_to", "is_same_size", "has_names", "_is_view", "requires_grad_"),
        *("retain_grad", "register_hook", "register_post_accumulate_grad_hook", "backward"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "new_tensor"),
    }
)
"""Functions of torch that look at a parameter's shape, type or gradient only."""


@cache
def reads_values(func: Any) -> bool:
    """Whether a function of torch reads its operands, or makes a view through which they can be read."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func.__self__.__name__ in _VIEWS
    return name not in ("__set__", "__delete__") and name not in _METADATA

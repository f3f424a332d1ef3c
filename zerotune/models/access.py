"""Noticing who reads a parameter, whatever way: the net under the hooks.

While it is active, every operation is looked at before it runs: an operand whose storage belongs to a managed
parameter is reported, so that it can be gathered first. It costs some microseconds an operation, and is active only in
passes that follow no recorded order; what it finds becomes part of the recorded order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Views count as reads: torch refuses to make one of a storage that is empty.
        for tensor in tensors_in((args, kwargs)):
            if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                unit = self._owners.get(tensor.untyped_storage()._cdata)
                if unit is not None:
                    self._report(unit)
        return func(*args, **kwargs)


"""Marks in torch's profile, by which one tells afterwards who allocated what.

Where no profiler runs a mark costs less than half a microsecond; what is done at every use asks :func:`is_profiled` first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

ENGINE = "zerotune::engine"
"""Gathers, releases and reductions at the entry to or exit from a use: whatever is allocated here is the engine's."""

FORWARD = "zerotune::forward"
"""A batch, the forward pass and the loss; inside it :data:`ENGINE` may stand."""


is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether torch's profiler runs."""


def mark(name: str) -> AbstractContextManager[None]:
    """A context that stands in the profile under a name, with everything that happens in it beneath."""
    context: AbstractContextManager[None] = torch._C._profiler._RecordFunctionFast(name)
    return context

"""zerotune: launcher and autotuner for ZeRO-3 training.

The public names are loaded on first use, so that ``import zerotune`` (and with it ``zerotune --help``) stays
cheap: torch is imported only when :class:`ZeroEngine` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotune.config.knobs import Knobs
    from zerotune.models.deferred import deferred
    from zerotune.zero.engine import ZeroEngine

__version__ = "0.1.0"
__all__ = ["Knobs", "ZeroEngine", "__version__", "deferred"]

_HOMES = {
    "ZeroEngine": "zerotune.zero.engine",
    "Knobs": "zerotune.config.knobs",
    "deferred": "zerotune.models.deferred",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zerotune' has no attribute {name!r}")

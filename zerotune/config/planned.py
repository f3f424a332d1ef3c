"""What the design promises and this version does not have yet, so that asking for it is not called a typo."""

from __future__ import annotations

from typing import Any

PLANNED_KEYS: dict[str, str] = {
    "offload": "remove the line; offload to host memory is not there yet",
    "offload_param": "remove the line; offload to host memory is not there yet",
    "offload_optimizer": "remove the line; offload to host memory is not there yet",
}
"""Keys of ``zero:`` and ``train:`` that come later, with what to do until then."""

PLANNED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "train.engine": (("ddp", "fsdp2", "deepspeed"), "use zerotune"),
}
"""Values that come later, by path, with what to use until then."""

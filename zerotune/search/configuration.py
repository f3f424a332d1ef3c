"""When two configurations are the same, and how one differs from the baseline."""

from __future__ import annotations

import json
from typing import Any

from zerotune.config.knobs import REGISTRY, Release, named_changes
from zerotune.config.schema import JobConfig


def acting_knobs(job: JobConfig) -> dict[str, Any]:
    """The knobs that act in a resolved configuration, in the registry's order.

    A knob that does nothing in this stage, or without another one, is left out: two configurations that differ
    only in it run the same.
    """
    assert job.train.micro_batch_size is not None
    acting = {name: value for name, value in job.knobs.items() if job.zero.stage in REGISTRY[name].stages}
    if job.zero.release is not Release.REUSE:
        acting.pop("max_reuse_distance", None)
    if job.zero.release is not Release.PLANNED:
        acting.pop("memory_budget", None)
    return acting


def canonical_key(job: JobConfig) -> str:
    """Text that is equal exactly for configurations that run the same."""
    return json.dumps(acting_knobs(job), sort_keys=True, default=str)


def changes(job: JobConfig, baseline: JobConfig) -> dict[str, str]:
    """Knobs of ``job`` that act and differ from the baseline's, as a reader is told of them."""
    usual = acting_knobs(baseline)
    found = {name: value for name, value in acting_knobs(job).items() if usual.get(name) != value}
    return {name: shown(value) for name, value in named_changes(found).items()}


def shown(value: Any) -> str:
    """A knob's value as a user would write it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)

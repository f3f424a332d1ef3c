"""In what two configurations differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerotune.config.knobs import REGISTRY
from zerotune.config.schema import JobConfig


@dataclass(frozen=True)
class Difference:
    """One value that differs.

    Attributes:
        path: Dotted path in model.yaml.
        before: Its value in the configuration that is the reference.
        after: Its value in the other.
    """

    path: str
    before: Any
    after: Any

    @property
    def name(self) -> str:
        """The last part of the path, which is a knob's name."""
        return self.path.rpartition(".")[2]


def knob_values(config: JobConfig) -> dict[str, Any]:
    """Every knob's value by its dotted path, in the registry's order."""
    return {REGISTRY[name].path: value for name, value in config.knobs.items()}


def knob_differences(reference: JobConfig, config: JobConfig) -> list[Difference]:
    """The knobs whose values differ, in the registry's order."""
    before, after = knob_values(reference), knob_values(config)
    return [Difference(path, before[path], after[path]) for path in before if before[path] != after[path]]


def config_differences(reference: JobConfig, config: JobConfig) -> list[Difference]:
    """All values that differ: the knobs first, in the registry's order, then the others in the file's order."""
    knobs = knob_differences(reference, config)
    before = dict(_leaves(reference.model_dump(mode="json"), ""))
    after = dict(_leaves(config.model_dump(mode="json"), ""))
    known = {info.path for info in REGISTRY.values()}
    others = [
        Difference(path, before.get(path), after.get(path))
        for path in dict.fromkeys([*before, *after])
        if path not in known and before.get(path) != after.get(path)
    ]
    return knobs + others


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, value

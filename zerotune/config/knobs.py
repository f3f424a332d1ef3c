"""The one registry of knobs: settings that move time and memory and never the mathematics.

:class:`Knobs` holds the values of one configuration; :data:`REGISTRY` says what each of them means. The command
line's table, the documentation pages, validation messages and exporters are all made from the registry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zerotune.config.section import Section
from zerotune.config.units import parse_bytes, parse_elements

AUTO: Literal["auto"] = "auto"


class Release(StrEnum):
    """When a gathered unit is dropped."""

    AFTER_USE = "after_use"
    REUSE = "reuse"
    KEEP = "keep"
    PLANNED = "planned"


def _elements_or_auto(value: object) -> object:
    return AUTO if value == AUTO else parse_elements(value)


def _elements_or_none(value: object) -> object:
    return None if value is None or value == "none" else parse_elements(value)


def _bytes_or_none(value: object) -> object:
    return None if value is None or value == "none" else parse_bytes(value)


def _unit_size(value: object) -> object:
    if value == "block":
        return value
    size = parse_elements(value)
    if size < 1:
        raise ValueError("unit_size is 'block' or at least 1 element")
    return size


Recomputed = Annotated[str, Field(pattern=r"^(none|full|every_([2-9]|[1-9][0-9]+))$")]
"""Which blocks are recomputed in backward: ``none``, ``full``, or ``every_K`` for every K-th."""

ElementsOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_elements_or_auto)]
ElementsOrNone = Annotated[int | None, BeforeValidator(_elements_or_none)]
BytesOrNone = Annotated[int | None, BeforeValidator(_bytes_or_none)]
UnitSize = Annotated[int | Literal["block"], BeforeValidator(_unit_size)]


class Knobs(Section):
    """One setting of the knobs that stand under ``zero:`` in model.yaml.

    Sizes are in elements, ``memory_budget`` in bytes. ``auto`` becomes a number once the model is known (:func:`zerotune.schedule.resolve`).
    """

    stage: Literal[0, 1, 2, 3] = 3
    unit_size: UnitSize = "block"
    allgather_bucket_size: ElementsOrAuto = AUTO
    prefetch_distance: ElementsOrAuto = AUTO
    backward_prefetch_distance: ElementsOrAuto = AUTO
    param_persistence_threshold: ElementsOrAuto = AUTO
    release: Release = Release.AFTER_USE
    max_reuse_distance: ElementsOrNone = None
    memory_budget: BytesOrNone = None
    max_live_parameters: ElementsOrNone = None
    reduce_bucket_size: ElementsOrAuto = AUTO
    overlap_comm: bool = True

    @property
    def is_resolved(self) -> bool:
        """Whether every ``auto`` has become a number."""
        return all(value != AUTO for _, value in self)


@dataclass(frozen=True)
class KnobInfo:
    """What one knob means.

    Attributes:
        name: Name in model.yaml.
        section: Section of model.yaml it stands in: ``zero`` or ``train``.
        type: What a user writes, in words.
        unit: Unit of its values: ``elements``, ``bytes``, ``samples`` or ``""``.
        default: The default, as a user would write it.
        meaning: One line.
        stages: The ZeRO stages in which it acts.
        deepspeed: The nearest setting of DeepSpeed, or ``None``.
        fsdp2: The nearest setting of FSDP2, or ``None``.
        example: A value to show in documentation.
        least: Smallest number it takes, for knobs with a unit.
        note: What else it moves, if that may surprise.
    """

    name: str
    section: Literal["zero", "train"]
    type: str
    unit: str
    default: str
    meaning: str
    stages: tuple[int, ...]
    deepspeed: str | None
    fsdp2: str | None
    example: str
    least: int = 0
    note: str = ""

    @property
    def path(self) -> str:
        """Dotted path in model.yaml, as ``--set`` takes it."""
        return f"{self.section}.{self.name}"

    @property
    def range(self) -> str:
        """What it takes, with the bounds of numbers."""
        return f"{self.type} of at least {self.least}" if self.unit else self.type

    def details(self) -> list[tuple[str, str]]:
        """What there is to say of it beside its meaning, as labels and values."""
        note = [("note", self.note)] if self.note else []
        return [
            ("takes", self.range),
            ("default", self.default),
            ("unit", self.unit or "none"),
            ("acts in", in_words(self.stages)),
            ("DeepSpeed", self.deepspeed or "none"),
            ("FSDP2", self.fsdp2 or "none"),
            *note,
        ]


def in_words(stages: Sequence[int]) -> str:
    """Stages as a text: ``stage 3``, ``stages 1, 2 and 3``, ``stages 0 to 3``."""
    if tuple(stages) == _ALL:
        return f"stages {_ALL[0]} to {_ALL[-1]}"
    *rest, last = map(str, stages)
    return f"stages {', '.join(rest)} and {last}" if rest else f"stage {last}"


_ALL = (0, 1, 2, 3)
_PARTITIONED = (1, 2, 3)
_THREE = (3,)

REGISTRY: dict[str, KnobInfo] = {
    info.name: info
    for info in (
        KnobInfo(
            "stage", "zero", "0, 1, 2 or 3", "", "3",
            "what is partitioned: nothing (0), optimizer state (1), gradients too (2), parameters too (3)",
            _ALL, "zero_optimization.stage", "fully_shard (3, or 2 without reshard_after_forward) or DDP (0)", "2",
        ),
        KnobInfo(
            "unit_size", "zero", "block, or a size", "elements", "block",
            "what is gathered and released together: a block, or the largest modules not above this size",
            _THREE, "stage3_module_granularity_threshold", "which modules fully_shard is called on", "50M", 1,
            note="the unit that forward ends with stays for backward; the smaller, the less is spared",
        ),
        KnobInfo(
            "allgather_bucket_size", "zero", "auto, or a size", "elements", "auto: one block",
            "units gathered in one collective, at most; at stages 1 and 2, in the refresh after a step",
            _PARTITIONED, None, "which modules share one fully_shard call", "100M",
        ),
        KnobInfo(
            "prefetch_distance", "zero", "auto, or a size", "elements", "auto: four blocks",
            "how far ahead of use gathers are issued, in backward as well unless that is set; 0 gathers on demand",
            _THREE, "stage3_prefetch_bucket_size", "set_modules_to_forward_prefetch", "50M",
            note="a unit that it would bring back at once, around the end of forward, stays and is not gathered again",
        ),
        KnobInfo(
            "backward_prefetch_distance", "zero", "auto, or a size", "elements",
            "auto: as prefetch_distance",
            "how far ahead of use gathers are issued in backward; 0 gathers on demand",
            _THREE, None, "set_modules_to_backward_prefetch", "100M",
            note="farther than in forward keeps the link busy under the head's backward; every unit takes its buffer where "
            "activations are most",
        ),
        KnobInfo(
            "param_persistence_threshold", "zero", "auto, or a size", "elements",
            "auto: min(1e5, 1 % of the largest block)",
            "parameters up to this size stay full on every rank during the step",
            _THREE, "stage3_param_persistence_threshold", None, "1e5",
        ),
        KnobInfo(
            "release", "zero", "after_use, reuse, keep or planned", "", "after_use",
            "drop after each use; drop unless used again within max_reuse_distance; keep from forward to backward; "
            "chosen for every unit within memory_budget",
            _THREE, "stage3_max_reuse_distance (0, a size, or huge)", "reshard_after_forward", "keep",
        ),
        KnobInfo(
            "max_reuse_distance", "zero", "a size", "elements", "none",
            "for release: reuse, how many elements may be used before the next use of a unit that is kept",
            _THREE, "stage3_max_reuse_distance", None, "500M",
        ),
        KnobInfo(
            "memory_budget", "zero", "a size", "bytes", "none",
            "for release: planned, the most that a rank may allocate: what is held against it is the allocator's peak",
            _THREE, None, None, "40GiB",
        ),
        KnobInfo(
            "max_live_parameters", "zero", "none, or a size", "elements", "none",
            "a bound on the elements of full parameters alive at once, gather buffers included",
            _THREE, "stage3_max_live_parameters (bounds prefetch only)", None, "1e9",
        ),
        KnobInfo(
            "reduce_bucket_size", "zero", "auto, or a size", "elements", "auto: one block",
            "gradients reduced in one collective, at most",
            _ALL, "reduce_bucket_size", "which modules fully_shard is called on", "100M",
        ),
        KnobInfo(
            "overlap_comm", "zero", "true or false", "", "true",
            "communication beside compute, or in line with it",
            _ALL, "overlap_comm", None, "false",
        ),
        KnobInfo(
            "micro_batch_size", "train", "a whole number", "samples", "auto: global batch / ranks",
            "samples per rank in one forward pass; the global batch is held constant by accumulation",
            _ALL, "train_micro_batch_size_per_gpu", None, "4", 1,
        ),
        KnobInfo(
            "activation_checkpointing", "train", "none, full or every_K", "", "none",
            "recompute blocks in backward instead of keeping what is inside them: no block, all, or every K-th",
            _ALL, "activation checkpointing of the model itself", "apply_activation_checkpointing", "every_2",
        ),
        KnobInfo(
            "accumulate", "train", "reduce or local", "", "reduce",
            "reduce the gradients of every micro-batch into the shards, or keep them full and reduce once per step",
            (0, 2, 3), "no_sync (stages 0 and 1)", "set_requires_gradient_sync", "local",
        ),
    )
}  # fmt: skip


def named_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Of knobs that changed those that are named for a reader: a distance of backward that follows that of forward is not."""
    named = dict(changes)
    if named.get("prefetch_distance") == named.get("backward_prefetch_distance"):
        named.pop("backward_prefetch_distance", None)
    return named


def find_knob(name: str) -> KnobInfo | None:
    """The knob called ``name`` here (``zero.stage`` or ``stage``) or, in one word, in DeepSpeed."""
    for info in REGISTRY.values():
        if name in (info.name, info.path):
            return info
    for info in REGISTRY.values():
        if name in (info.deepspeed or "").replace(".", " ").split():
            return info
    return None


class OptimizerName(StrEnum):
    """Optimizers that the trainer builds by name."""

    ADAMW = "adamw"
    SGD = "sgd"


PositiveInt = Annotated[int, Field(ge=1)]

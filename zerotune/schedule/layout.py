"""What the scheduler knows of a model: its units and their sizes. Pure numbers, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zerotune.schedule.padding import padded_numel, slice_numel


@dataclass(frozen=True)
class ParamSize:
    """One parameter, by identity.

    Attributes:
        name: Its first name in the module (``blocks.0.attn.qkv.weight``).
        numel: Elements, without padding.
        trainable: Whether it gets a gradient.
        persistent: Whether it stays full on every rank during the step; it is then in no gather.
    """

    name: str
    numel: int
    trainable: bool = True
    persistent: bool = False


@dataclass(frozen=True)
class UnitSize:
    """Parameters that are gathered and released together.

    Attributes:
        name: Name of the module at which they hang (``blocks.0``), or of its parameter.
        params: In a fixed order, the same on every rank.
        backward_needs_weights: Whether its backward pass reads its weights. An embedding's does not.
        is_block: Whether it is one of the model's repeated blocks.
    """

    name: str
    params: tuple[ParamSize, ...]
    backward_needs_weights: bool = True
    is_block: bool = False

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


class ParamRef(NamedTuple):
    """A parameter by the index of its unit and its place within the unit."""

    unit: int
    place: int


@dataclass(frozen=True)
class Layout:
    """A model cut into units, over N ranks.

    Attributes:
        units: In the order of the module tree.
        ranks: Number of ranks, N.
    """

    units: tuple[UnitSize, ...]
    ranks: int

    def numel(self, unit: int) -> int:
        """Elements that a gather of the unit carries: its parameters but the persistent ones, without padding."""
        return self._numels[unit]

    def padded(self, unit: int) -> int:
        """The same with padding: what the full parameters occupy."""
        return self._padded[unit]

    @cached_property
    def _numels(self) -> list[int]:
        return [sum(p.numel for p in unit.params if not p.persistent) for unit in self.units]

    @cached_property
    def _padded(self) -> list[int]:
        return [
            sum(padded_numel(p.numel, self.ranks) for p in unit.params if not p.persistent)
            for unit in self.units
        ]

    @cached_property
    def persistent_units(self) -> frozenset[int]:
        """Units with nothing to gather: all their parameters are persistent."""
        return frozenset(unit for unit, padded in enumerate(self._padded) if padded == 0)

    def needed(self, units: Sequence[int], is_backward: bool) -> list[int]:
        """Those of some units whose weights a use reads: not the persistent ones, nor what backward can do without."""
        return [
            unit
            for unit in units
            if unit not in self.persistent_units
            and (not is_backward or self.units[unit].backward_needs_weights)
        ]

    def param(self, ref: ParamRef) -> ParamSize:
        return self.units[ref.unit].params[ref.place]

    def param_padded(self, ref: ParamRef) -> int:
        return padded_numel(self.param(ref).numel, self.ranks)

    def slice(self, ref: ParamRef) -> int:
        return slice_numel(self.param(ref).numel, self.ranks)

    def refs(self) -> Iterator[ParamRef]:
        """All parameters, in the order of units."""
        for unit, size in enumerate(self.units):
            for index in range(len(size.params)):
                yield ParamRef(unit, index)

    @property
    def total_numel(self) -> int:
        """All parameters, P."""
        return sum(unit.numel for unit in self.units)

    @property
    def total_padded(self) -> int:
        """All parameters with their padding, persistent ones included."""
        return sum(padded_numel(p.numel, self.ranks) for unit in self.units for p in unit.params)

    @property
    def largest_block(self) -> int:
        """Elements of the largest repeated block; of the largest unit where no block repeats."""
        blocks = [unit.numel for unit in self.units if unit.is_block]
        return max(blocks or [unit.numel for unit in self.units], default=0)

    @property
    def largest_parameter(self) -> int:
        return max((p.numel for unit in self.units for p in unit.params), default=0)

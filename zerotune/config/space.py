"""Search spaces: which knobs a search may turn, and over which values.

A space is a YAML file. Sizes may be multiples of a size of the model, so that one space serves a toy and a 70B::

    description: What it is good for.
    knobs:
      release: [after_use, reuse, keep]
      prefetch_distance: {relative_to: block, values: [0, 1, 2, 4]}
      reduce_bucket_size: {relative_to: block, low: 0.25, high: 8, log: true}
      max_reuse_distance: {relative_to: model, values: [0.5, 1], when: {release: reuse}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeGuard

from pydantic import Field, ValidationError, create_model, field_validator, model_validator

from zerotune.config.errors import UsageError
from zerotune.config.explain import one_of, show
from zerotune.config.knobs import REGISTRY, Release
from zerotune.config.load import raise_problems, validate
from zerotune.config.schema import JobConfig, knob_default, section_of
from zerotune.config.section import Section
from zerotune.config.source import KeyPath, Source, parse_yaml, read_text

RelativeTo = Literal["block", "model", "largest_parameter", "file"]
Value = int | float | str | bool | None
"""A raw choice. Numbers of a relative dimension are multiples; ``None`` is a knob's "none"."""

_MICRO = "micro_batch_size"


# --------------------------------------------------------------------------------------------- what a file says


class _DimensionConfig(Section):
    """One knob of a space file; a list alone stands for ``{values: [...]}``."""

    values: list[Any] | None = Field(None, min_length=1)
    low: Any = None
    high: Any = None
    log: bool = False
    relative_to: RelativeTo | None = None
    when: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _list_is_values(cls, value: Any) -> Any:
        return {"values": value} if isinstance(value, list) else value


_fields: dict[str, Any] = dict.fromkeys(REGISTRY, (_DimensionConfig | None, None))
_KnobsConfig = create_model("_KnobsConfig", __base__=Section, **_fields)


class _SpaceConfig(Section):
    """A space file."""

    description: str = ""
    knobs: _KnobsConfig  # type: ignore[valid-type]

    @field_validator("description")
    @classmethod
    def _one_line(cls, value: str) -> str:
        return " ".join(value.split())


# --------------------------------------------------------------------------------------------- what is made of it


@dataclass(frozen=True)
class ModelSizes:
    """Sizes that multiples refer to, in elements.

    Attributes:
        block: The largest repeated block.
        model: All parameters.
        largest_parameter: The largest single parameter.
        has_blocks: Whether blocks repeat; otherwise ``block`` is the largest unit.
    """

    block: int
    model: int
    largest_parameter: int
    has_blocks: bool = True


@dataclass(frozen=True)
class Dimension:
    """One knob that a search may turn: either ``values``, or a range from ``low`` to ``high``.

    Attributes:
        name: Name of the knob.
        values: The choices, or ``None`` for a range.
        low: Lower end of the range, itself included.
        high: Upper end of the range, itself included.
        log: Whether the range is sampled by its logarithm.
        relative_to: What numbers are multiples of; ``None`` if they are absolute. ``file`` is the micro-batch of
            model.yaml.
        when: The knobs, with the values of each, that this one needs to have a meaning; empty if it always has.
    """

    name: str
    values: tuple[Value, ...] | None = None
    low: float | int | None = None
    high: float | int | None = None
    log: bool = False
    relative_to: RelativeTo | None = None
    when: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    @property
    def is_integer(self) -> bool:
        """Whether a range is one of whole numbers: absolute sizes are, multiples are not."""
        return self.relative_to is None

    def is_active(self, choices: Mapping[str, Any]) -> bool:
        """Whether the knob has a meaning beside the choices made for the others."""
        return all(choices.get(name) in allowed for name, allowed in self.when.items())

    def facts(self) -> dict[str, Any]:
        """What defines it, as plain JSON."""
        found = {
            "values": list(self.values) if self.values is not None else None,
            "low": self.low,
            "high": self.high,
            "log": self.log or None,
            "relative_to": self.relative_to,
            "when": {name: list(allowed) for name, allowed in self.when.items()} or None,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Space:
    """A search space.

    Attributes:
        name: Name or path it was picked by.
        description: One line.
        dimensions: The knobs in the order in which to choose: one that depends on another comes after it.
    """

    name: str
    description: str
    dimensions: tuple[Dimension, ...]

    def __iter__(self) -> Iterator[Dimension]:
        return iter(self.dimensions)

    def __getitem__(self, name: str) -> Dimension:
        for dimension in self.dimensions:
            if dimension.name == name:
                return dimension
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(dimension.name == name for dimension in self.dimensions)

    def points(self) -> int | None:
        """How many different choices there are; ``None`` if there is a range among the dimensions."""
        if any(dimension.values is None for dimension in self.dimensions):
            return None
        choices: list[dict[str, Value]] = [{}]
        free = [dimension for dimension in self.dimensions if not dimension.when]
        parents = {name for dimension in self.dimensions for name in dimension.when}
        total = 1
        for dimension in free:
            values = dimension.values or ()
            if dimension.name in parents:
                choices = [{**choice, dimension.name: value} for choice in choices for value in values]
            else:
                total *= len(values)
        dependent = [dimension for dimension in self.dimensions if dimension.when]
        return total * sum(
            prod(len(dimension.values or ()) for dimension in dependent if dimension.is_active(choice))
            for choice in choices
        )

    def fingerprint_facts(self) -> dict[str, Any]:
        """What makes two spaces the same question: the dimensions, not the name or the description."""
        return {dimension.name: dimension.facts() for dimension in self.dimensions}

    def apply(self, choices: Mapping[str, Any], sizes: ModelSizes, base: JobConfig) -> JobConfig:
        """Turn choices into a job with absolute knobs.

        Args:
            choices: Raw value by name of knob. What is not there stays as in ``base``; ``micro_batch_size`` is for
                :meth:`micro_batch_size`.
            sizes: What multiples refer to.
            base: The job of the file.

        Returns:
            The job, in which a knob that the other choices leave without meaning is back at its default.

        Raises:
            UsageError: ``release: reuse`` was chosen, and neither the choices nor ``base`` say for which distance; or
                ``planned``, and none of them nor the search has a budget.
        """
        unknown = [name for name in choices if name not in self]
        assert not unknown, f"choices that are not in space {self.name}: {unknown}"
        values = base.knobs
        for dimension in self.dimensions:
            name = dimension.name
            if name == _MICRO:
                continue
            if not dimension.is_active({**values, **choices}):
                values[name] = knob_default(name)
            elif name in choices:
                values[name] = _absolute(dimension, choices[name], sizes)
        if values["release"] != Release.REUSE:
            values["max_reuse_distance"] = None
        elif values["max_reuse_distance"] is None:
            raise UsageError(
                f"space {self.name} offers release: reuse without a max_reuse_distance",
                "add zero.max_reuse_distance to model.yaml, or max_reuse_distance to the space",
            )
        if values["release"] != Release.PLANNED:
            values["memory_budget"] = None
        elif values["memory_budget"] is None:
            values["memory_budget"] = base.search.memory_budget
        if values["release"] == Release.PLANNED and values["memory_budget"] is None:
            raise UsageError(
                f"space {self.name} offers release: planned without a memory_budget",
                "set search.memory_budget, which it takes then, or zero.memory_budget",
            )
        return base.with_knobs(values)

    def micro_batch_size(self, choices: Mapping[str, Any], base: int, per_rank: int) -> int:
        """Samples per rank in one forward pass.

        Args:
            choices: Raw value by name of knob.
            base: The micro-batch of the file, or ``global batch / ranks``.
            per_rank: ``global batch / ranks``. A multiple of ``base`` goes to the nearest size that divides it;
                an absolute size is taken as it is, so that :func:`~zerotune.config.check.batch_plan` can refuse it.
        """
        if _MICRO not in self or _MICRO not in choices:
            return base
        if self[_MICRO].relative_to is None:
            return int(choices[_MICRO])
        wanted = base * float(choices[_MICRO])
        fitting = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        return min(fitting, key=lambda size: (abs(size - wanted), size))


def _absolute(dimension: Dimension, choice: Any, sizes: ModelSizes) -> Any:
    if dimension.relative_to is None or not _is_number(choice):
        return choice
    size = round(choice * getattr(sizes, dimension.relative_to))
    return max(size, 1) if dimension.name == "unit_size" else size


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ------------------------------------------------------------------------------------------------------ finding


def list_spaces() -> list[str]:
    """Names of the spaces that ship with zerotune."""
    entries = [entry.name for entry in _folder().iterdir() if entry.is_file()]
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


def load_space(name_or_path: str | Path) -> Space:
    """Read a space.

    Args:
        name_or_path: Name of a space that ships with zerotune, or path of a YAML file.

    Raises:
        UsageError: No such space.
        ConfigErrors: The file is not a space; all that is wrong with it, with places.
    """
    name = str(name_or_path)
    if name in (names := list_spaces()):
        return read_space((_folder() / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml", name)
    looks_like_path = Path(name).suffix in (".yaml", ".yml") or "/" in name or "\\" in name
    if looks_like_path or (name and Path(name).is_file()):
        return read_space(read_text(name, "a space", f"the spaces by name are {one_of(names)}"), name, name)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UsageError(
        f"no space is called {name!r}", f"{hint}there are {', '.join(names)}, or give a path to a .yaml file"
    )


def _folder() -> Traversable:
    """Where the spaces are: inside the installed package, or at the root of a checkout."""
    installed = files("zerotune") / "search_spaces"
    if installed.is_dir():
        return installed
    return Path(__file__).resolve().parents[2] / "search_spaces"


# ------------------------------------------------------------------------------------------------------ reading


def read_space(text: str, filename: str, name: str) -> Space:
    """Read the text of a space.

    Args:
        text: YAML.
        filename: For places in messages.
        name: Name of the space.

    Raises:
        ConfigErrors: All that is wrong with it.
    """
    source = parse_yaml(text, filename)
    if source.data is None:
        raise_problems(
            source.problems or [source.problem((), "the file is empty; write `knobs:` and a knob under it")]
        )
    config = validate(source, _SpaceConfig)
    reader = _Reader(source)
    return Space(name, config.description, reader.dimensions(config.knobs))


class _Reader:
    """Makes dimensions of what a file says, and collects what is wrong."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[Any] = []

    def wrong(self, path: KeyPath, message: str) -> None:
        self.problems.append(self.source.problem(("knobs", *path), message))

    def dimensions(self, knobs: Section) -> tuple[Dimension, ...]:
        given = {name: config for name in REGISTRY if (config := getattr(knobs, name)) is not None}
        if not given:
            self.wrong((), "has no knob in it; add one, for example `release: [after_use, keep]`")
        found = {name: self.dimension(name, config) for name, config in given.items()}
        for name, dimension in found.items():
            self.check_conditions(dimension, given[name], found)
        release = found.get("release")
        reuses = release is not None and Release.REUSE in (release.values or ())
        if reuses and "max_reuse_distance" not in found:
            self.wrong(
                ("release",),
                "reuse needs max_reuse_distance in the space; add it with when: {release: reuse}",
            )
        raise_problems(self.problems)
        return tuple(sorted(found.values(), key=lambda dimension: bool(dimension.when)))

    def dimension(self, name: str, config: _DimensionConfig) -> Dimension:
        info, relative = REGISTRY[name], config.relative_to
        if relative == "file" and name != _MICRO:
            self.wrong(
                (name, "relative_to"), "file is for micro_batch_size; write block, model or largest_parameter"
            )
        elif relative not in (None, "file") and info.unit != "elements":
            how = "write file" if name == _MICRO else "remove it"
            self.wrong(
                (name, "relative_to"), f"{relative} is for sizes in elements, which {name} is not; {how}"
            )
        ends = [end for end in ("low", "high") if getattr(config, end) is not None]
        values: tuple[Value, ...] | None = None
        low = high = None
        if config.values is not None and ends:
            self.wrong((name,), f"has both values and {' and '.join(ends)}; give values, or low and high")
        elif config.values is not None:
            read = [
                self.value(name, (name, "values", at), item, relative)
                for at, item in enumerate(config.values)
            ]
            values = tuple(read)
            repeated = [item for at, item in enumerate(read) if item in read[:at]]
            if repeated and not self.problems:
                self.wrong((name, "values"), f"{show(repeated[0])} stands there twice; remove one")
        elif len(ends) == 2 and info.unit:
            low, high = (
                self.value(name, (name, end), getattr(config, end), relative) for end in ("low", "high")
            )
            self.check_range(name, low, high, config.log)
        else:
            how = "values, or low and high" if info.unit else "values"
            self.wrong((name,), f"takes {how}; write for example `{name}: {_example(name)}`")
        if config.log and config.values is not None:
            self.wrong((name, "log"), "has no meaning for values; remove it")
        when = {parent: tuple(v if isinstance(v, list) else [v]) for parent, v in config.when.items()}
        return Dimension(name, values, low, high, config.log, relative, when)  # type: ignore[arg-type]

    def value(self, name: str, path: KeyPath, raw: Any, relative: str | None) -> Value:
        """One value of a knob, read as the knob reads it; a number of a relative dimension stays as it is."""
        if relative is not None and _is_number(raw):
            if not 0 <= raw < float("inf") or (raw == 0 and name in ("unit_size", _MICRO)):
                self.wrong(path, f"{show(raw)} is out of range; write a multiple above 0")
            return raw
        if name == _MICRO:
            if isinstance(raw, bool) or not _is_number(raw) or raw < 1 or raw != int(raw):
                self.wrong(path, f"{show(raw)} is not a whole number of samples")
                return None
            return int(raw)
        try:
            value = getattr(section_of(name).model_validate({name: raw}), name)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "value_error":
                self.wrong(path, str(first["ctx"]["error"]))
            else:
                self.wrong(path, f"{show(raw)} is not a value of {name}, which is {REGISTRY[name].type}")
            return None
        if relative is not None and _is_number(value):
            self.wrong(
                path, f"{show(raw)} is a size, but relative_to wants multiples; write for example 0.5 or 2"
            )
        return str(value) if isinstance(value, Release) else value

    def check_range(self, name: str, low: Value, high: Value, log: bool) -> None:
        if not (_is_number(low) and _is_number(high)):
            if not self.problems:
                self.wrong((name,), "low and high must be numbers; list words such as auto under values")
        elif low >= high:
            self.wrong((name, "high"), f"{show(high)} is not above low {show(low)}")
        elif log and low <= 0:
            self.wrong((name, "low"), "a range with log: true starts above 0")

    def check_conditions(
        self, dimension: Dimension, config: _DimensionConfig, found: dict[str, Dimension]
    ) -> None:
        for parent, allowed in dimension.when.items():
            path: KeyPath = (dimension.name, "when", parent)
            if parent not in found:
                others = [name for name in found if name != dimension.name]
                self.wrong(path, f"is not a knob of this space; there are {', '.join(others) or 'no others'}")
            elif found[parent].values is None or found[parent].when:
                self.wrong(path, "cannot be a condition: it is a range, or has a condition itself")
            else:
                for value in allowed:
                    if value not in (found[parent].values or ()):
                        choices = one_of([str(choice) for choice in found[parent].values or ()])
                        self.wrong(path, f"{show(value)} is not among its values here; write {choices}")


def _example(name: str) -> str:
    if REGISTRY[name].unit == "elements":
        return "{relative_to: block, values: [0.5, 1, 2]}"
    return _EXAMPLES.get(name, "[1, 2, 4]")


_EXAMPLES = {
    "release": "[after_use, keep]",
    "overlap_comm": "[true, false]",
    "stage": "[2, 3]",
    "activation_checkpointing": "[none, full]",
    "accumulate": "[reduce, local]",
}

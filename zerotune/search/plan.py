"""Everything a search needs to know before it starts; making one starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zerotune.config.check import batch_plan
from zerotune.config.errors import UsageError
from zerotune.config.knobs import REGISTRY, Release
from zerotune.config.schema import JobConfig, SearchConfig, knob_default
from zerotune.config.space import Dimension, ModelSizes, Space
from zerotune.records import Fingerprint
from zerotune.schedule import resolve_knobs
from zerotune.search.configuration import acting_knobs, canonical_key, shown
from zerotune.search.dimensions import Choices
from zerotune.search.question import question, study_name

_MICRO = "micro_batch_size"
_RECOMPUTED = "activation_checkpointing"
_OF_RELEASE = {"max_reuse_distance", "memory_budget"}
_UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class SearchPlan:
    """A question with all that is needed to turn choices into configurations.

    Attributes:
        job: The configuration, command-line options merged into it.
        space: The knobs to turn, without values that cannot run.
        sizes: What multiples in the space refer to.
        ranks: Number of data-parallel ranks.
        workload: What is trained.
        cluster: Where.
        name: Name given by ``--study``, if any.
        notes: One line for each thing that was left out of the space.
    """

    job: JobConfig
    space: Space
    sizes: ModelSizes
    ranks: int
    workload: Fingerprint
    cluster: Fingerprint
    name: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def search(self) -> SearchConfig:
        return self.job.search

    @cached_property
    def question(self) -> Fingerprint:
        return question(self.job, self.space.fingerprint_facts(), self.workload, self.cluster)

    @property
    def study(self) -> str:
        """Name of the study."""
        return self.name or study_name(self.job, self.cluster, self.question)

    def values_in_numbers(self, dimension: Dimension) -> str:
        """The values of a dimension as they will run, multiples multiplied out."""

        def number(value: Any) -> str:
            if value is None or isinstance(value, (str, bool)):
                return shown(value)
            choices = {
                dimension.name: value,
                **{name: allowed[0] for name, allowed in dimension.when.items()},
            }
            return shown(self.configure(choices).knobs[dimension.name])

        if dimension.values is not None:
            text = ", ".join(number(value) for value in dimension.values)
        else:
            text = f"{number(dimension.low)} to {number(dimension.high)}" + (
                " (log)" if dimension.log else ""
            )
        conditions = [
            f"{name} = {' or '.join(map(shown, allowed))}" for name, allowed in dimension.when.items()
        ]
        return f"{text} (with {', '.join(conditions)})" if conditions else text

    # ---------------------------------------------------------------------------------------- configurations

    @cached_property
    def baseline(self) -> JobConfig:
        """The defaults that a speed-up is measured against; the micro-batch is the file's."""
        defaults = self.job.with_knobs({name: knob_default(name) for name in REGISTRY})
        return self.resolve(defaults, self.file_micro_batch)

    @cached_property
    def baseline_key(self) -> str:
        return canonical_key(self.baseline)

    @cached_property
    def from_file(self) -> JobConfig | None:
        """The file's own knobs, if they differ from the defaults."""
        job = self.resolve(self.job, self.file_micro_batch)
        return job if canonical_key(job) != self.baseline_key else None

    @property
    def file_micro_batch(self) -> int:
        train = self.job.train
        return batch_plan(train.global_batch_size, self.ranks, train.micro_batch_size).micro_batch_size

    def configure(self, choices: Choices) -> JobConfig:
        """The configuration that a point of the space stands for, every knob a number."""
        return self._configure(choices, self.job)

    def from_defaults(self, choices: Choices) -> JobConfig:
        """The configuration with these choices, and the defaults for what else the space turns, every knob a number."""
        turns = {dimension.name for dimension in self.space}
        if "release" not in turns:
            turns -= _OF_RELEASE  # the file's, like what they belong to
        return self._configure(choices, self.job.with_knobs({name: knob_default(name) for name in turns}))

    def _configure(self, choices: Choices, base: JobConfig) -> JobConfig:
        return self.resolve(self.space.apply(choices, self.sizes, base), self._micro_batch(choices))

    def _micro_batch(self, choices: Choices) -> int:
        per_rank = self.job.train.global_batch_size // self.ranks
        return self.space.micro_batch_size(choices, self.file_micro_batch, per_rank)

    def resolve(self, job: JobConfig, micro_batch: int) -> JobConfig:
        """A job with this micro-batch, and every ``auto`` a number.

        Raises:
            UsageError: The global batch does not divide.
        """
        batch_plan(job.train.global_batch_size, self.ranks, micro_batch)
        job = job.with_knobs({_MICRO: micro_batch})
        return job.model_copy(update={"zero": resolve_knobs(job.zero, self.sizes.block)})

    def choices_of(self, job: JobConfig) -> Choices | None:
        """The point of the space that stands for a configuration, or ``None`` if none does.

        A size may be off by a hundredth of a block, as a default is that the space has as a multiple.
        """
        choices = self.nearest(job)
        ones, others = acting_knobs(self.configure(choices)), acting_knobs(job)
        is_found = ones.keys() == others.keys() and all(
            self._are_alike(name, value, others[name]) for name, value in ones.items()
        )
        return choices if is_found else None

    def missing(self, job: JobConfig) -> Choices:
        """The nearest values of those knobs for which the space has none that stands for a configuration's."""
        return {
            name: value
            for name, value in self.nearest(job).items()
            if not self._are_alike(name, self._becomes(job, {name: value}, name), job.knobs[name])
        }

    def _are_alike(self, name: str, one: Any, other: Any) -> bool:
        are_sizes = REGISTRY[name].unit == "elements" and isinstance(one, int) and isinstance(other, int)
        return one == other or (are_sizes and abs(one - other) <= self.sizes.block // 100)

    def nearest(self, job: JobConfig) -> Choices:
        """The point of the space with each knob as near as it can be to that of a configuration."""
        choices: Choices = {}
        for dimension in self.space.dimensions:
            if dimension.is_active(choices):
                choices[dimension.name] = self._nearest(dimension, job)
        return choices

    def _nearest(self, dimension: Dimension, job: JobConfig) -> Any:
        name, wanted = dimension.name, job.knobs[dimension.name]

        def distance(value: Any) -> tuple[bool, float]:
            becomes = self._becomes(job, {name: value}, name)
            return becomes != wanted, abs(self._as_size(becomes) - self._as_size(wanted))

        return min(self._candidates(dimension, wanted), key=distance)

    def _as_size(self, value: Any) -> float:
        """A value on a scale: without a bound lies beyond all sizes; of words, all are alike."""
        if value is None:
            return float(_UNBOUNDED)
        if value == "block":
            return float(self.sizes.block)
        return float(value) if isinstance(value, (int, float)) else 0.0

    def _becomes(self, job: JobConfig, choice: Choices, name: str) -> Any:
        """What a knob of ``job`` becomes by one choice; ``None`` where that cannot stand beside its other knobs."""
        if name == _MICRO:
            return self._micro_batch(choice)
        # Whether the knob has a meaning is for the caller to know: conditions are met by the job itself.
        met = {parent: job.knobs[parent] for parent in self.space[name].when}
        try:
            applied = self.space.apply({**met, **choice}, self.sizes, job)
        except UsageError:
            return None
        return applied.model_copy(update={"zero": resolve_knobs(applied.zero, self.sizes.block)}).knobs[name]

    def _candidates(self, dimension: Dimension, wanted: Any) -> Iterator[Any]:
        if dimension.values is not None:
            yield from dimension.values
            return
        assert dimension.low is not None and dimension.high is not None
        if not isinstance(wanted, int):
            yield dimension.high
            return
        match dimension.relative_to:
            case None:
                value = float(wanted)
            case "file":
                value = wanted / self.file_micro_batch
            case size:
                value = wanted / getattr(self.sizes, size)
        value = min(max(value, dimension.low), dimension.high)
        yield round(value) if dimension.is_integer else value


def make_plan(
    job: JobConfig,
    space: Space,
    sizes: ModelSizes,
    ranks: int,
    workload: Fingerprint,
    cluster: Fingerprint,
    name: str | None = None,
) -> SearchPlan:
    """Make the plan of a search.

    Micro-batches that do not divide the global batch over these ranks are left out of the space, and so are
    recomputation for a model without blocks, and ``release: planned`` without a memory budget.

    Raises:
        UsageError: The file's own batch does not divide, or no micro-batch of the space does.
    """
    train = job.train
    batch_plan(train.global_batch_size, ranks, train.micro_batch_size)
    per_rank = train.global_batch_size // ranks
    notes: tuple[str, ...] = ()
    if _RECOMPUTED in space and not sizes.has_blocks:
        space = _without(space, _RECOMPUTED)
        notes = (f"{_RECOMPUTED} left out: the model has no blocks that repeat",)
    if not job.search.memory_budget and not job.zero.memory_budget and "memory_budget" not in space:
        space, note = _without_plans(space)
        notes += note
    if _MICRO in space and space[_MICRO].relative_to is None:
        fitting, left_out = _fitting(space[_MICRO], per_rank)
        if not fitting:
            sizes_that_fit = ", ".join(str(size) for size in range(1, per_rank + 1) if per_rank % size == 0)
            raise UsageError(
                f"no micro_batch_size of space {space.name} divides {per_rank} samples per rank",
                f"use one of {sizes_that_fit}",
            )
        if left_out:
            shown = ", ".join(str(value) for value in left_out)
            notes += (f"micro_batch_size {shown} left out: {per_rank} samples per rank do not divide by it",)
        narrowed = replace(space[_MICRO], values=fitting, low=None, high=None, log=False)
        dimensions = tuple(narrowed if each.name == _MICRO else each for each in space.dimensions)
        space = replace(space, dimensions=dimensions)
    return SearchPlan(job, space, sizes, ranks, workload, cluster, name, notes)


def _without_plans(space: Space) -> tuple[Space, tuple[str, ...]]:
    """A space without ``release: planned``, where it has other choices, and a note of that."""
    if "release" not in space or Release.PLANNED not in (values := space["release"].values or ()):
        return space, ()
    others = tuple(value for value in values if value != Release.PLANNED)
    if not others:
        raise UsageError(
            f"space {space.name} has no other release than planned, which needs a memory budget",
            "give --memory-budget, or set zero.memory_budget",
        )
    dimensions = tuple(
        replace(each, values=others) if each.name == "release" else each for each in space.dimensions
    )
    return replace(space, dimensions=dimensions), ("release planned left out: there is no memory budget",)


def _without(space: Space, name: str) -> Space:
    """A space without one knob, which stays as the file has it.

    Raises:
        UsageError: Nothing else is in it.
    """
    left = tuple(each for each in space.dimensions if each.name != name and name not in each.when)
    if not left:
        raise UsageError(
            f"space {space.name} turns only {name}, which this model cannot", "use another space"
        )
    return replace(space, dimensions=left)


def _fitting(dimension: Dimension, per_rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Micro-batches of a dimension that divide the samples of a rank, and those listed ones that do not."""
    if dimension.values is None:
        assert dimension.low is not None and dimension.high is not None
        low, high = int(dimension.low), min(int(dimension.high), per_rank)
        return tuple(size for size in range(low, high + 1) if per_rank % size == 0), ()
    listed = [int(value) for value in dimension.values if isinstance(value, (int, float))]
    return (
        tuple(size for size in listed if per_rank % size == 0),
        tuple(size for size in listed if per_rank % size),
    )

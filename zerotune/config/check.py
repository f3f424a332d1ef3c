"""What takes more than one key to see: values without effect, values that contradict each other, the batch plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from zerotune.config.errors import UsageError
from zerotune.config.knobs import REGISTRY, OptimizerName, Release, in_words
from zerotune.config.schema import JobConfig
from zerotune.config.section import Section
from zerotune.config.source import KeyPath

Finding = tuple[KeyPath, str]
"""Path of a key and what is to be said of it."""

BYTE_VALUES = 256
"""Tokens of a text without a tokenizer."""


def no_effect(job: JobConfig) -> list[Finding]:
    """Values that were set, differ from their default and change nothing in this combination."""
    return [*_knobs_without_effect(job), *_train_without_effect(job)]


def _set(section: Section, *names: str) -> Iterator[str]:
    """Those of ``names`` that were written down with another value than the default."""
    for name in names:
        if name in section.model_fields_set:
            default = type(section).model_fields[name].get_default(call_default_factory=True)
            if getattr(section, name) != default:
                yield name


def _knobs_without_effect(job: JobConfig) -> Iterator[Finding]:
    zero = job.zero
    for name, info in REGISTRY.items():
        if name not in _set(getattr(job, info.section), name):
            continue
        if zero.stage not in info.stages:
            acts = in_words(info.stages)
            yield (info.section, name), f"has no effect at stage {zero.stage}, it acts at {acts}; remove it"
        elif name == "max_reuse_distance" and zero.release is not Release.REUSE:
            yield (
                ("zero", name),
                f"has no effect with release: {zero.release}, only with release: reuse; remove it",
            )
        elif name == "memory_budget" and zero.release is not Release.PLANNED:
            yield (
                ("zero", name),
                f"has no effect with release: {zero.release}, only with release: planned; remove it",
            )


def _train_without_effect(job: JobConfig) -> Iterator[Finding]:
    train = job.train
    others = {OptimizerName.ADAMW: ("momentum", "nesterov"), OptimizerName.SGD: ("betas", "eps")}
    for name in _set(train.optimizer, *others[train.optimizer.name]):
        yield ("train", "optimizer", name), f"has no effect with {train.optimizer.name}; remove it"
    if train.precision == "fp32":
        for name in _set(train, "gradient_dtype", "reduce_dtype"):
            yield ("train", name), "has no effect with precision fp32; remove it"
    if train.precision != "fp16":
        for name in _set(train.loss_scale, *type(train.loss_scale).model_fields):
            yield (
                ("train", "loss_scale", name),
                f"has no effect with precision {train.precision}, only with fp16; remove it",
            )
    if train.clip_norm is None:
        for name in _set(train, "clip_norm_type"):
            yield ("train", name), "clips nothing without train.clip_norm; add it"
    schedule = train.lr_schedule
    if schedule.name == "constant":
        for name in _set(schedule, "decay_steps", "min_ratio"):
            yield (
                ("train", "lr_schedule", name),
                "has no effect with a constant schedule; use cosine or linear",
            )
    elif schedule.min_ratio == 1.0:
        yield (
            ("train", "lr_schedule", "name"),
            f"{schedule.name} has no effect with min_ratio 1; lower min_ratio",
        )
    if train.optimizer.lr == 0 and train.optimizer.weight_decay:
        yield ("train", "optimizer", "weight_decay"), "has no effect with lr 0; raise lr"


def conflicts(job: JobConfig) -> list[Finding]:
    """Values that cannot stand together, in one section or across several."""
    return [*_knob_conflicts(job), *_batch_conflicts(job), *_vocabulary_conflicts(job)]


def _knob_conflicts(job: JobConfig) -> Iterator[Finding]:
    zero = job.zero
    if zero.stage == 3 and zero.release is Release.REUSE and zero.max_reuse_distance is None:
        yield (
            ("zero", "release"),
            "reuse needs zero.max_reuse_distance; add it, for example max_reuse_distance: 50M",
        )
    if zero.stage == 3 and zero.release is Release.PLANNED and zero.memory_budget is None:
        yield (
            ("zero", "release"),
            "planned needs zero.memory_budget; add it, for example memory_budget: 40GiB",
        )


def _batch_conflicts(job: JobConfig) -> Iterator[Finding]:
    whole, micro = job.train.global_batch_size, job.train.micro_batch_size
    if micro is not None and whole % micro:
        good = _near(micro, _divisors(whole))
        message = f"{micro} does not divide global_batch_size {whole}; write {good}"
        yield ("train", "micro_batch_size"), message


def _vocabulary_conflicts(job: JobConfig) -> Iterator[Finding]:
    if job.data.text is None or job.data.text.tokenizer is not None:
        return
    for kind in ("gpt", "llama"):
        model = getattr(job.model, kind)
        if model is not None and model.vocab_size < BYTE_VALUES:
            message = f"{model.vocab_size} is too small for text as bytes; write {BYTE_VALUES}, or set data.text.tokenizer"
            yield ("model", kind, "vocab_size"), message


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch is spread.

    Attributes:
        micro_batch_size: Samples per rank in one forward pass.
        accumulation: Forward passes per optimizer step.
    """

    micro_batch_size: int
    accumulation: int


def batch_plan(global_batch: int, ranks: int, micro_batch: int | None) -> BatchPlan:
    """Spread the global batch over ranks and micro-batches.

    Args:
        global_batch: Samples per optimizer step over all ranks.
        ranks: Number of ranks.
        micro_batch: Samples per rank in one forward pass; ``None`` takes ``global_batch / ranks``.

    Raises:
        UsageError: It does not divide; the remedy names the nearest sizes that do.
    """
    per_rank, rest = divmod(global_batch, ranks)
    if rest:
        sizes = _near(global_batch, [ranks * max(per_rank, 1), ranks * (per_rank + 1)])
        fitting = _near(ranks, _divisors(global_batch))
        raise UsageError(
            f"train.global_batch_size {global_batch} does not divide over {ranks} ranks",
            f"use a global batch of {sizes}, or {fitting} ranks",
        )
    micro = per_rank if micro_batch is None else micro_batch
    if micro < 1 or per_rank % micro:
        fits = _near(micro, _divisors(per_rank))
        portion = ranks * max(micro, 1)
        sizes = _near(
            global_batch, [portion * max(global_batch // portion, 1), portion * (global_batch // portion + 1)]
        )
        raise UsageError(
            f"train.global_batch_size {global_batch} does not divide into {ranks} ranks x micro_batch_size {micro}",
            f"use a micro_batch_size of {fits}, or a global batch of {sizes}",
        )
    return BatchPlan(micro, per_rank // micro)


def _divisors(whole: int) -> list[int]:
    small = [size for size in range(1, isqrt(whole) + 1) if whole % size == 0]
    return small + [whole // size for size in small]


def _near(value: int, candidates: list[int], most: int = 4) -> str:
    """The candidates nearest to ``value``, ascending: ``2, 4 or 8``."""
    nearest = sorted(sorted(set(candidates), key=lambda size: abs(size - value))[:most])
    words = [str(size) for size in nearest]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"

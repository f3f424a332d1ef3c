"""Dimensions of a space as Optuna's parameters, and as points that can be listed or drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna

from zerotune.config.space import Dimension

Choices = dict[str, Any]
"""Raw choice by name of knob, as :meth:`zerotune.config.space.Space.apply` takes them."""

MOST_POINTS = 20_000
"""Spaces with more points than this are not listed."""


def suggest(trial: optuna.trial.Trial, dimensions: Sequence[Dimension]) -> Choices:
    """Ask the sampler for a point, leaving out what has no meaning beside the other choices."""
    choices: Choices = {}
    for dimension in dimensions:
        if dimension.is_active(choices):
            choices[dimension.name] = _suggest_one(trial, dimension)
    return choices


def _suggest_one(trial: optuna.trial.Trial, dimension: Dimension) -> Any:
    name = dimension.name
    if dimension.values is not None:
        if _is_scale(dimension):
            return dimension.values[trial.suggest_int(name, 0, len(dimension.values) - 1)]
        return trial.suggest_categorical(name, dimension.values)
    assert dimension.low is not None and dimension.high is not None
    if dimension.is_integer:
        return trial.suggest_int(name, int(dimension.low), int(dimension.high), log=dimension.log)
    return trial.suggest_float(name, float(dimension.low), float(dimension.high), log=dimension.log)


def _is_scale(dimension: Dimension) -> bool:
    """Whether the values are numbers in order, so that their places tell a sampler which are near each other."""
    values = dimension.values or ()
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return len(values) > 2 and len(numbers) == len(values) and sorted(numbers) == numbers


def to_parameters(choices: Mapping[str, Any], dimensions: Sequence[Dimension]) -> dict[str, Any]:
    """A point as the parameters with which :func:`suggest` arrives at it."""
    parameters = dict(choices)
    for dimension in dimensions:
        if dimension.name in parameters and _is_scale(dimension):
            assert dimension.values is not None
            parameters[dimension.name] = dimension.values.index(parameters[dimension.name])
    return parameters


def enumerate_all(dimensions: Sequence[Dimension]) -> Iterator[Choices] | None:
    """Every point of a space, or ``None`` if it has ranges or too many points."""
    if any(dimension.values is None for dimension in dimensions):
        return None
    if math.prod(len(dimension.values or ()) for dimension in dimensions) > MOST_POINTS:
        return None
    return _points(dimensions, {})


def _points(dimensions: Sequence[Dimension], chosen: Choices) -> Iterator[Choices]:
    if not dimensions:
        yield dict(chosen)
        return
    first, *rest = dimensions
    if not first.is_active(chosen):
        yield from _points(rest, chosen)
        return
    for value in first.values or ():
        yield from _points(rest, {**chosen, first.name: value})


def draw(rng: random.Random, dimensions: Sequence[Dimension]) -> Choices:
    """A point at random."""
    choices: Choices = {}
    for dimension in dimensions:
        if dimension.is_active(choices):
            choices[dimension.name] = _draw_one(rng, dimension)
    return choices


def _draw_one(rng: random.Random, dimension: Dimension) -> Any:
    if dimension.values is not None:
        return rng.choice(dimension.values)
    assert dimension.low is not None and dimension.high is not None
    low, high = float(dimension.low), float(dimension.high)
    value = math.exp(rng.uniform(math.log(low), math.log(high))) if dimension.log else rng.uniform(low, high)
    value = min(max(value, low), high)
    return round(value) if dimension.is_integer else value

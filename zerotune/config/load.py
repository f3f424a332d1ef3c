"""Reads model.yaml, with ``--set`` options over it; all that is wrong is told at once, each with its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from zerotune.config.check import conflicts, no_effect
from zerotune.config.errors import ConfigErrors
from zerotune.config.explain import check_alternatives, explain
from zerotune.config.overrides import apply_sets
from zerotune.config.schema import JobConfig
from zerotune.config.section import Section, child_section
from zerotune.config.source import KeyPath, Problem, Source, parse_yaml, read_text

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Loaded:
    """A model.yaml that was read.

    Attributes:
        job: What it says.
        warnings: One line for each value that was set and has no effect, with its place.
        path: The file, as the user gave it.
    """

    job: JobConfig
    warnings: list[str]
    path: Path


def load_job(path: Path | str, sets: Sequence[str] = ()) -> Loaded:
    """Read a model.yaml.

    Args:
        path: The file.
        sets: Options ``a.b=value`` that replace values of the file.

    Raises:
        ConfigErrors: All that is wrong, one line each: ``model.yaml:14:3: zero.prefech_distance: no such knob,
            did you mean prefetch_distance?``.
    """
    text = read_text(path, "a model.yaml", "run `zerotune init` to write one")
    return read_job(text, str(path), sets)


def read_job(text: str, name: str = "model.yaml", sets: Sequence[str] = ()) -> Loaded:
    """Read the text of a model.yaml; see :func:`load_job`.

    Args:
        text: YAML.
        name: Name of the file, for messages.
        sets: Options ``a.b=value``.

    Raises:
        ConfigErrors: All that is wrong with it.
    """
    source = parse_yaml(text, name)
    if source.data is None:
        raise_problems(source.problems)
        if not sets:
            raise ConfigErrors([f"{name}:1:1: the file is empty; run `zerotune init` to write one"])
    if source.data is None or isinstance(source.data, dict):
        apply_sets(source, sets, JobConfig)
    job = validate(source, JobConfig)
    found = [source.problem(path, message) for path, message in conflicts(job)]
    raise_problems(found)
    warnings = sorted(source.problem(path, message) for path, message in no_effect(job))
    return Loaded(job, [str(warning) for warning in warnings], Path(name))


def validate(source: Source, root: type[S]) -> S:
    """Hold what was read against its schema.

    Args:
        source: What was read; sections that are there but empty become mappings.
        root: The schema.

    Raises:
        ConfigErrors: All that is wrong, the text's own problems first.
    """
    problems = list(source.problems)
    if isinstance(source.data, dict):
        source.data = _fill_empty(source, source.data, root, ())
    try:
        value = root.model_validate(source.data if source.data is not None else {})
    except ValidationError as error:
        found = explain(error.errors(include_url=False), source, root)
        problems = found + check_alternatives(source, root, found)
    else:
        if not problems:
            return value
    problems = source.problems + [problem for problem in problems if not _follows(problem, source.problems)]
    raise_problems(problems)
    raise AssertionError("unreachable: there are problems")


def _follows(problem: Problem, causes: list[Problem]) -> bool:
    """Whether a problem only comes of a value that could not be read."""
    return any(
        (problem.place, problem.path) == (cause.place, cause.path)
        or cause.path.startswith(f"{problem.path}.")
        for cause in causes
    )


def _fill_empty(
    source: Source, data: dict[Any, Any], section: type[Section], path: KeyPath
) -> dict[Any, Any]:
    """Sections with nothing in them: ``gpt:`` is a gpt with its defaults, ``train:`` is as if it were not there."""
    filled: dict[Any, Any] = {}
    for key, value in data.items():
        inner, below = child_section(section, key), (*path, key)
        if inner is None:
            filled[key] = value
            continue
        if value is None and below in source.bare:
            value = {}
        if isinstance(value, dict):
            value = _fill_empty(source, value, inner, below)
        optional_section = not path and not section.model_fields[key].is_required()
        if optional_section and (value is None or value == {}):
            continue
        filled[key] = value
    return filled


def raise_problems(problems: list[Problem]) -> None:
    """Raise all of them as one error, in the order of their places; none is fine.

    Raises:
        ConfigErrors: There are some.
    """
    if problems:
        raise ConfigErrors([str(problem) for problem in sorted(set(problems))])

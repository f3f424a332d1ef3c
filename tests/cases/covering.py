"""Covering arrays: few rows in which every combination of any ``strength`` columns' values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Combination = tuple[tuple[str, Any], ...]


def covering_array(
    columns: Mapping[str, Sequence[Any]], strength: int = 2, tries: int = 20, seed: int = 0
) -> list[Row]:
    """A covering array, built greedily and the same every time.

    Args:
        columns: Values of every column.
        strength: How many columns' combinations are covered.
        tries: Candidates per row, of which the one that covers most is taken.
        seed: Of the candidates.

    Returns:
        Rows, each with a value for every column.
    """
    rng = random.Random(seed)
    left = dict.fromkeys(combinations(columns, strength))
    rows: list[Row] = []
    while left:
        candidates = [_candidate(columns, strength, left, rng) for _ in range(tries)]
        row = max(candidates, key=lambda row: sum(c in left for c in combinations_of(row, strength)))
        rows.append(row)
        for covered in combinations_of(row, strength):
            left.pop(covered, None)
    return rows


def combinations(columns: Mapping[str, Sequence[Any]], strength: int) -> Iterable[Combination]:
    """Every combination of values of ``strength`` columns."""
    for names in itertools.combinations(sorted(columns), strength):
        for values in itertools.product(*(columns[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def combinations_of(row: Row, strength: int) -> Iterable[Combination]:
    """Those that a row covers."""
    for names in itertools.combinations(sorted(row), strength):
        yield tuple((name, row[name]) for name in names)


def _candidate(
    columns: Mapping[str, Sequence[Any]], strength: int, left: Mapping[Combination, None], rng: random.Random
) -> Row:
    """A row around the first combination that is left; every other column takes the value that covers most."""
    row = dict(next(iter(left)))
    for name in rng.sample(sorted(columns.keys() - row), len(columns) - len(row)):
        values = rng.sample(list(columns[name]), len(columns[name]))
        row[name] = max(values, key=lambda value: _gain(row, name, value, strength, left))
    return {name: row[name] for name in columns}


def _gain(row: Row, name: str, value: Any, strength: int, left: Mapping[Combination, None]) -> int:
    trial = row | {name: value}
    return sum(c in left for c in combinations_of(trial, strength) if any(n == name for n, _ in c))

"""``zerotune spaces``: which search spaces there are, and what is in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerotune.cli.console import print_json
from zerotune.cli.options import Json

if TYPE_CHECKING:
    from zerotune.config.space import Dimension, Space


def spaces(
    name: Annotated[str | None, typer.Argument(metavar="[NAME|FILE]", help="One space, in detail.")] = None,
    as_json: Json = False,
) -> None:
    """List the search spaces: which knobs a search may turn, and over which values."""
    from zerotune.config.space import list_spaces, load_space

    if name is not None:
        space = load_space(name)
        print_json(_facts(space)) if as_json else _print_one(space)
        return
    found = [load_space(each) for each in list_spaces()]
    print_json([_facts(space) for space in found]) if as_json else _print_all(found)


def _facts(space: Space) -> dict[str, Any]:
    return {"name": space.name, "description": space.description, "knobs": space.fingerprint_facts()}


def _print_all(found: list[Space]) -> None:
    from rich.table import Table

    from zerotune.cli.console import print_parts

    table = Table("space", "knobs", "points", "what it is for")
    for space in found:
        points = space.points()
        table.add_row(
            space.name, str(len(space.dimensions)), "∞" if points is None else str(points), space.description
        )
    for column in table.columns[:3]:
        column.no_wrap = True
    print_parts([table])


def _print_one(space: Space) -> None:
    from rich.table import Table
    from rich.text import Text

    from zerotune.cli.console import out, print_parts

    console = out()
    console.print(Text(space.name, style="bold"), Text(space.description), soft_wrap=True)
    table = Table("knob", "values", "in", "only when")
    for dimension in space:
        table.add_row(dimension.name, _values(dimension), _unit(dimension), _condition(dimension))
    print_parts([table])


def _values(dimension: Dimension) -> str:
    if dimension.values is None:
        return f"{dimension.low} to {dimension.high}{', by its logarithm' if dimension.log else ''}"
    return ", ".join(_word(value) for value in dimension.values)


def _word(value: object) -> str:
    """A value as it stands in YAML."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unit(dimension: Dimension) -> str:
    from zerotune.config.knobs import REGISTRY

    named = {"block": "x largest block", "model": "x model", "largest_parameter": "x largest parameter"}
    if dimension.relative_to is None:
        return REGISTRY[dimension.name].unit
    return named.get(dimension.relative_to, "x micro_batch_size of the file")


def _condition(dimension: Dimension) -> str:
    return ", ".join(
        f"{name}: {' or '.join(map(_word, allowed))}" for name, allowed in dimension.when.items()
    )

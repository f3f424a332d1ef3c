"""``zerotune knobs``: what can be tuned."""

from __future__ import annotations

from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerotune.cli.console import print_json
from zerotune.cli.options import Json
from zerotune.config.errors import UsageError

if TYPE_CHECKING:
    from zerotune.config.knobs import KnobInfo


def knobs(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One knob, in detail.")] = None,
    as_json: Json = False,
) -> None:
    """List the knobs: settings that move time and memory and never the mathematics."""
    from zerotune.config.knobs import REGISTRY

    chosen = None if name is None else _find(name)
    if as_json:
        print_json(_facts(chosen) if chosen else [_facts(info) for info in REGISTRY.values()])
    elif chosen:
        _print_one(chosen)
    else:
        _print_all()


def _find(name: str) -> KnobInfo:
    from zerotune.config.knobs import REGISTRY, find_knob

    info = find_knob(name)
    if info is None:
        close = get_close_matches(name, REGISTRY, n=1, cutoff=0.5)
        remedy = f"did you mean {close[0]}?" if close else f"there are {', '.join(REGISTRY)}"
        raise UsageError(f"{name}: no such knob", remedy)
    return info


def _facts(info: KnobInfo) -> dict[str, Any]:
    return {**asdict(info), "path": info.path, "range": info.range}


def _print_all() -> None:
    from rich.table import Table

    from zerotune.cli.console import print_parts
    from zerotune.config.knobs import REGISTRY

    table = Table("knob", "default", "unit", "meaning")
    for column in table.columns[:3]:
        column.no_wrap = True
    for info in REGISTRY.values():
        table.add_row(info.path, info.default, info.unit, info.meaning)
    print_parts([table])


def _print_one(info: KnobInfo) -> None:
    from rich.table import Table
    from rich.text import Text

    from zerotune.cli.console import out

    console = out()
    console.print(Text(info.path, style="bold"))
    console.print(Text(info.meaning), soft_wrap=True)
    grid = Table.grid(padding=(0, 2))
    for label, value in info.details():
        grid.add_row(label, Text(value))
    console.print()
    console.print(grid)

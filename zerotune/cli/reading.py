"""What the commands that only read the store share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table
    from rich.text import Text

    from zerotune.store.store import Store


def open_store(option: str | None) -> Store:
    """Open the store for reading.

    Raises:
        NoStore: There is none yet.
        UsageError: It cannot be used.
    """
    from zerotune.store.location import store_url
    from zerotune.store.store import Store

    return Store.open(store_url(option), create=False)


def print_parts(parts: Iterable[Table | Text | None]) -> None:
    """Print tables and lines to stdout, every value whole."""
    from rich.console import Console
    from rich.table import Table

    from zerotune.report.printing import print_whole

    console = Console(highlight=False)
    for part in parts:
        if isinstance(part, Table):
            print_whole(console, part)
        elif part is not None:
            console.print(part, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print one JSON document to stdout."""
    import json

    print(json.dumps(document, indent=2, allow_nan=False))


def note(line: str) -> None:
    """Print a line that is no result: to stderr, so that stdout stays readable for programs."""
    import typer

    typer.echo(line, err=True)


def note_unreadable(store: Store) -> None:
    """Say which rows were left out because another version wrote them."""
    if store.unreadable:
        ids = ", ".join(sorted(store.unreadable))
        note(f"note: left out, because this version of zerotune cannot read them: {ids}")

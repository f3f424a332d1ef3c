"""Where lines go: results to stdout, everything else to stderr, so that ``--json`` stays readable for programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDE = 10_000


def out() -> Console:
    """Console for results. Where stdout is no terminal nothing is folded to 80 columns."""
    return _console(sys.stdout)


def err() -> Console:
    """Console for progress, warnings and errors."""
    return _console(sys.stderr)


def print_table(table: Table) -> None:
    """Print a table to stdout with every value whole."""
    from zerotune.report.printing import print_whole

    print_whole(out(), table)


def warn(line: str) -> None:
    """Print a warning to stderr."""
    _labelled("warning", "yellow", line)


def error(line: str) -> None:
    """Print an error to stderr."""
    _labelled("error", "red", line)


def _labelled(label: str, colour: str, line: str) -> None:
    console = err()
    console.print(f"[bold {colour}]{label}:[/] ", end="")
    console.print(line, markup=False, soft_wrap=True)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    # The stream of now, not of import time: tests and redirections replace it.
    width = None if stream.isatty() else _WIDE
    return Console(file=stream, width=width, highlight=False)

"""Where lines go: results to stdout, everything else to stderr, so that ``--json`` stays readable for programs."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_WIDE = 10_000


def out() -> Console:
    """Console for results. Where stdout is no terminal nothing is folded to 80 columns."""
    return _console(sys.stdout)


def err() -> Console:
    """Console for progress, warnings and errors."""
    return _console(sys.stderr)


def print_parts(parts: Iterable[Table | Text | None]) -> None:
    """Print tables and lines to stdout, every value whole."""
    from rich.table import Table

    from zerotune.report.printing import print_whole

    console = out()
    for part in parts:
        if isinstance(part, Table):
            print_whole(console, part)
        elif part is not None:
            console.print(part, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print one JSON document to stdout; what JSON has no number for (infinity, NaN) is null."""
    import json

    print(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def say(line: str) -> None:
    """Print a line that is no result: to stderr, so that stdout stays readable for programs."""
    err().print(line, markup=False, soft_wrap=True)


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

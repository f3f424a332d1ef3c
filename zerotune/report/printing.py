"""Printing tables so that no number is ever cut, whatever the width."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segments
from rich.table import Column, Table
from rich.text import Text

PIPED_WIDTH = 160
"""Columns that are aimed at where the output is no terminal and ``COLUMNS`` does not say otherwise."""

_LEAST_FOLDED = 24
"""Characters that a column of text keeps when there is too little room."""

_LEAST_BESIDE = 40
"""The same for a sheet, whose text goes below its rows rather than into a narrower column."""

_INDENT = 6
_ENDLESS = 10_000


class Sheet(Table):
    """A table of figures whose columns of text go below the figures where there is too little room beside them.

    Attributes:
        dispensable: Headers of columns that are left out where even the figures are too wide, in that order.
    """

    def __init__(self, *headers: Column | str, dispensable: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*headers, padding=(0, 1, 0, 0), **options)
        self.dispensable = tuple(dispensable)


def print_whole(console: Console, table: Table) -> None:
    """Print a table with every value whole.

    Rich cuts values to fit the width. Here columns of text fold, and if that is not enough the table is wider than
    the terminal, which wraps its lines. Where there is no terminal, sheets have :data:`PIPED_WIDTH` and other tables
    the width they need, and no line ends in spaces.
    """
    is_sheet = isinstance(table, Sheet)
    width = _room(console, is_sheet)
    texts = [column for column in table.columns if not column.no_wrap]
    natural = [_width(column) for column in table.columns]
    frame = _frame(table, len(table.columns))
    if sum(natural) + frame <= width:
        _print_folded(console, table, natural)
        return
    figures = sum(_width(column) for column in table.columns if column.no_wrap) + frame
    least = [_least(column, _LEAST_BESIDE if is_sheet else _LEAST_FOLDED) for column in texts]
    if isinstance(table, Sheet) and figures + sum(least) > width:
        _print_stacked(console, table, width)
        return
    shares = iter(_shares([_width(column) for column in texts], least, width - figures))
    widths = [
        wanted if column.no_wrap else next(shares)
        for column, wanted in zip(table.columns, natural, strict=True)
    ]
    _print_folded(console, table, widths)


def _room(console: Console, is_sheet: bool) -> int:
    if console.is_terminal:
        return console.width
    if not is_sheet:
        return _ENDLESS
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) > 0 else PIPED_WIDTH


def _shares(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Divide the room among columns of text: none gets less than its least or more than it wants."""
    shares = list(least)
    spare = room - sum(shares)
    while spare > 0 and (hungry := [i for i, share in enumerate(shares) if share < wanted[i]]):
        for i in hungry[:spare]:
            shares[i] += 1
            spare -= 1
    return shares


def _print_folded(console: Console, table: Table, widths: Sequence[int]) -> None:
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    table.width = sum(widths) + _frame(table, len(widths))
    _print(console, [table, Text("")] if table.caption else [table])


def _print_stacked(console: Console, table: Sheet, width: int) -> None:
    """Figures in columns, and the text of each row in lines of its own below them."""
    kept = [column for column in table.columns if column.no_wrap]
    for header in table.dispensable:
        if sum(_width(column) for column in kept) + _frame(table, len(kept)) <= width:
            break
        kept = [column for column in kept if str(column.header) != header]
    figures = Table(box=table.box, padding=table.padding, header_style=table.header_style)
    for column in kept:
        figures.add_column(
            column.header, justify=column.justify, no_wrap=True, width=_width(column), style=column.style
        )
    cells = [list(column.cells) for column in kept]
    for number, row in enumerate(table.rows):
        figures.add_row(*(column[number] for column in cells), style=row.style)
    lines = console.render_lines(figures, console.options.update(width=_ENDLESS, no_wrap=True), pad=False)
    head = len(lines) - len(table.rows) - (figures.box is not None)  # the last line is the frame's
    parts: list[Any] = [Text(str(table.title), style=table.title_style or "")] if table.title else []
    parts += [Segments(line) for line in lines[:head]]
    texts = [list(column.cells) for column in table.columns if not column.no_wrap]
    for number, row in enumerate(table.rows):
        parts.append(Segments(lines[head + number]))
        for text in texts:
            parts += [Text(line, style=row.style or "") for line in _wrapped(str(text[number]), width)]
    if table.caption:
        parts.append(Text(""))
        for caption in str(table.caption).splitlines():
            parts += [Text(line, style="table.caption") for line in _wrapped(caption, width, "", "  ")]
    parts.append(Text(""))
    _print(console, parts)


def _wrapped(text: str, width: int, first: str = " " * _INDENT, then: str = " " * _INDENT) -> list[str]:
    """Lines of a text, indented; a word longer than a line stays whole, so that it can be copied."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _print(console: Console, parts: Iterable[Any]) -> None:
    with console.capture() as captured:
        for part in parts:
            if isinstance(part, Table):
                console.print(part, crop=False, no_wrap=True, overflow="ignore")
            else:
                console.print(part, soft_wrap=True)
                if isinstance(part, Segments):
                    console.print()
    lines = captured.get().split("\n")
    if not console.is_terminal:
        lines = [line.rstrip() for line in lines]
    console.file.write("\n".join(lines))
    console.file.flush()


def _frame(table: Table, columns: int) -> int:
    """Characters of a table of so many columns that are no value: padding, and lines if it has any."""
    _, right, _, left = table.padding
    return columns * (left + right) + (columns + 1 if table.box is not None else 0)


def _texts(column: Column) -> list[str]:
    return [str(column.header), *(str(cell) for cell in column.cells)]


def _width(column: Column) -> int:
    return max(cell_len(line) for text in _texts(column) for line in (text.splitlines() or [""]))


def _least(column: Column, at_least: int) -> int:
    return min(_width(column), max(at_least, _longest_word(column)))


def _longest_word(column: Column) -> int:
    return max((cell_len(word) for text in _texts(column) for word in text.split()), default=0)

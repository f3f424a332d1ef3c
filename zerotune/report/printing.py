"""Printing tables so that no number is ever cut."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

_LEAST_FOLDED = 24
"""Characters that a column of text keeps when there is too little room."""


def print_whole(console: Console, table: Table) -> None:
    """Print a table with every value whole.

    Rich cuts values to fit the width, which is 80 columns when the output is not a terminal. Here, where there is no
    terminal the table takes the width it needs; on a terminal columns of text fold, and if that is not enough the
    table is wider than the terminal and the terminal wraps its lines.
    """
    natural = [_width(column) for column in table.columns]
    frame = 3 * len(table.columns) + 1
    width = sum(natural) + frame
    if console.is_terminal and width > console.width:
        least = sum(
            wanted if column.no_wrap else min(wanted, max(_LEAST_FOLDED, _longest_word(column)))
            for column, wanted in zip(table.columns, natural, strict=True)
        )
        width = max(console.width, least + frame)
    table.width = width
    for column, wanted in zip(table.columns, natural, strict=True):
        if column.no_wrap:
            column.width = wanted
    console.print(table, crop=False, no_wrap=True, overflow="ignore")


def _texts(column: Column) -> list[str]:
    return [str(column.header), *(str(cell) for cell in column.cells)]


def _width(column: Column) -> int:
    return max(cell_len(line) for text in _texts(column) for line in (text.splitlines() or [""]))


def _longest_word(column: Column) -> int:
    return max((cell_len(word) for text in _texts(column) for word in text.split()), default=0)

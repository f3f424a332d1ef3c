"""Tables that are printed whole, whatever the width."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich import box
from rich.console import Console
from rich.table import Column

from zerotune.report.printing import Sheet, print_whole


def printed(sheet: Sheet, width: int) -> list[str]:
    file = io.StringIO()
    print_whole(Console(file=file, width=width, force_terminal=True, color_system=None), sheet)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("frame", [None, box.SIMPLE, box.ROUNDED])
@given(rows=st.integers(1, 6), width=st.integers(5, 120), has_text=st.booleans())
def test_every_row_of_a_sheet_is_there_once(
    frame: box.Box | None, rows: int, width: int, has_text: bool
) -> None:
    text = [Column("what it is")] if has_text else []
    sheet = Sheet(
        *(Column(name, no_wrap=True) for name in ("name", "some figure", "another figure")),
        *text,
        dispensable=("another figure",),
        box=frame,
    )
    for number in range(rows):
        sheet.add_row(f"row{number}", "1.000 [0.900, 1.100]", "12345", *(["some words of text"] * has_text))
    lines = printed(sheet, width)
    assert sum("some figure" in line for line in lines) == 1
    for number in range(rows):
        assert sum(f"row{number}" in line and "1.000 [0.900, 1.100]" in line for line in lines) == 1

"""Two explanations beside each other, figure by figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Column
from rich.text import Text

from zerotune.report.explain import Explanation
from zerotune.report.explain_text import peak_rows
from zerotune.report.format import MISSING, memory, milliseconds
from zerotune.report.printing import Sheet


@dataclass(frozen=True)
class Row:
    """One figure of both runs; ``None`` where a run has none.

    Attributes:
        label: What it is.
        unit: Seconds, bytes, or bytes times seconds.
        first: Of the first run.
        second: Of the second.
    """

    label: str
    unit: Literal["s", "bytes", "byte_s"]
    first: float | None
    second: float | None

    def text(self, value: float | None) -> str:
        """A value of this row with its unit."""
        if value is None:
            return MISSING
        if self.unit == "bytes":
            return memory(value)
        return f"{milliseconds(value)} ms" if self.unit == "s" else f"{value / 2**20:.2f} MiB s"


def comparison_rows(first: Explanation, second: Explanation) -> list[Row]:
    """Step, hidden and exposed time of every flow, the peak and its parts, and what lies idle."""
    both = (first, second)
    rows = [Row("step", "s", first.step_s, second.step_s)]
    flows = [{flow.title: flow for flow in each.flows} for each in both]
    for title in dict.fromkeys(title for each in flows for title in each):
        a, b = (each.get(title) for each in flows)
        rows.append(Row(f"{title}, hidden", "s", a.hidden_s if a else None, b.hidden_s if b else None))
        rows.append(Row(f"{title}, exposed", "s", a.exposed_s if a else None, b.exposed_s if b else None))
    rows.append(Row("peak", "bytes", first.peak.bytes, second.peak.bytes))
    parts = [dict(peak_rows(each.peak)) for each in both]
    for label in dict.fromkeys(label for each in parts for label in each):
        rows.append(Row(f"  {label}", "bytes", parts[0].get(label, 0), parts[1].get(label, 0)))
    rows.append(Row("idle full parameters", "byte_s", first.idle_byte_s, second.idle_byte_s))
    return rows


def rows_table(names: tuple[str, str], rows: list[Row]) -> Sheet:
    """The rows for the terminal."""
    table = Sheet(
        Column("", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in names),
        box=None,
        title=Text("one step, explained"),
        title_justify="left",
        title_style="bold",
    )
    for row in rows:
        table.add_row(Text(row.label), row.text(row.first), row.text(row.second))
    return table


def rows_document(rows: list[Row]) -> dict[str, Any]:
    """The rows for programs: by label, pairs with their unit."""
    return {row.label.strip(): {"unit": row.unit, "values": [row.first, row.second]} for row in rows}

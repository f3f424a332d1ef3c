"""Explanations as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerotune.records import Ledger
from zerotune.report import format
from zerotune.report.explain import Explanation
from zerotune.report.explain_text import (
    QUESTIONS,
    classes_text,
    gradients_text,
    longest_text,
    peak_rows,
    resident_text,
)
from zerotune.report.timeline import gradient_figure, memory_figure, timeline_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from zerotune.report.explain_compare import Row

_SHOWN = 10


@dataclass(frozen=True)
class Explained:
    """A run with what is known of one of its steps.

    Attributes:
        run_id: Its id.
        headline: What it trained, in a line.
        ledgers: One per rank.
        explanation: Of them.
    """

    run_id: str
    headline: str
    ledgers: Sequence[Ledger]
    explanation: Explanation


def explanation_page(run: Explained) -> str:
    """The page of one run: findings, the five questions with figures, and the timeline."""
    found = run.explanation
    history = next(ledger.memory for ledger in run.ledgers if ledger.rank == found.peak.rank)
    return _render(
        "explain.html.j2",
        run=run,
        found=found,
        questions=QUESTIONS,
        resident=resident_text(found),
        ranks=[(rank, classes_text(classes)) for rank, classes in enumerate(found.at_rest)],
        peak_rows=peak_rows(found.peak),
        gradients=gradients_text(found),
        longest=longest_text,
        sent=format.sent,
        held=[each for each in found.held if each.idle_byte_s > 0][:_SHOWN],
        figures={
            "timeline": _inline(timeline_figure([("", run.ledgers)])),
            "memory": _inline(memory_figure(history)) if history else "",
            "gradients": _inline(gradient_figure(run.ledgers, found.bucket_bytes)),
        },
    )


def comparison_page(first: Explained, second: Explained, rows: Sequence[Row]) -> str:
    """Two runs: the figures of their explanations beside each other, and both timelines on one axis."""
    return _render(
        "compare.html.j2",
        runs=(first, second),
        rows=rows,
        figures={
            "timeline": _inline(timeline_figure([(each.run_id, each.ledgers) for each in (first, second)]))
        },
    )


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("zerotune.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(memory=format.memory, ms=format.milliseconds)
    return environment.get_template(template).render(plotlyjs=get_plotlyjs(), **values)


def _inline(figure: go.Figure) -> str:
    """A figure as an element of a page that has plotly's script already."""
    html: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}
    )
    return html

"""``zerotune compare``: two runs beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerotune.cli.console import print_json, print_parts
from zerotune.cli.explain import explained, write
from zerotune.cli.options import Json, StoreOption
from zerotune.cli.reading import open_store
from zerotune.config.errors import UsageError

_HELP = "Id of a run, or the beginning of one."


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help=_HELP)],
    second: Annotated[str, typer.Argument(metavar="RUN", help=_HELP)],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write both steps on one axis of time, as a page."),
    ] = None,
    as_json: Json = False,
    store: StoreOption = None,
) -> None:
    """Compare two runs: configurations, measurements, whether the difference is more than noise, and where it lies."""
    from zerotune.report.comparison import compare as compare_runs
    from zerotune.report.describe import describe_comparison
    from zerotune.report.explain_compare import comparison_rows, rows_document, rows_table
    from zerotune.report.json_view import comparison_document

    with open_store(store) as opened:
        comparison = compare_runs(opened.get_run(first), opened.get_run(second))
        one, other = explained(opened, first), explained(opened, second)
    rows = comparison_rows(one.explanation, other.explanation) if one and other else []
    if html is not None:
        if one is None or other is None:
            raise UsageError("--html: one of the runs has no ledger", "compare runs that are complete")
        from zerotune.report.page import comparison_page

        write(html, comparison_page(one, other, rows))
    if as_json:
        print_json({**comparison_document(comparison), "step": rows_document(rows)})
    else:
        names = (comparison.first.run_id, comparison.second.run_id)
        print_parts([*describe_comparison(comparison), *([rows_table(names, rows)] if rows else [])])

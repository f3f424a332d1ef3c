"""``zerotune compare``: two runs beside each other."""

from __future__ import annotations

from typing import Annotated

import typer

from zerotune.cli.console import print_json, print_parts
from zerotune.cli.options import Json, StoreOption
from zerotune.cli.reading import open_store

_HELP = "Id of a run, or the beginning of one."


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help=_HELP)],
    second: Annotated[str, typer.Argument(metavar="RUN", help=_HELP)],
    as_json: Json = False,
    store: StoreOption = None,
) -> None:
    """Compare two runs: configurations, measurements, and whether the difference is more than noise."""
    from zerotune.report.comparison import compare as compare_runs
    from zerotune.report.describe import describe_comparison
    from zerotune.report.json_view import comparison_document

    with open_store(store) as opened:
        comparison = compare_runs(opened.get_run(first), opened.get_run(second))
    if as_json:
        print_json(comparison_document(comparison))
    else:
        print_parts(describe_comparison(comparison))

"""``zerotune show``: everything that is known of one run."""

from __future__ import annotations

from typing import Annotated

import typer

from zerotune.cli.console import print_json, print_parts
from zerotune.cli.options import Json, StoreOption
from zerotune.cli.reading import open_store


def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or the beginning of one.")],
    as_json: Json = False,
    store: StoreOption = None,
) -> None:
    """Show one run: how it ended, its configuration, what was measured, and the ledger of one step."""
    from zerotune.records import RunKind
    from zerotune.report.bench import bench_lines, bench_table
    from zerotune.report.describe import describe_run
    from zerotune.report.json_view import show_document

    with open_store(store) as opened:
        record = opened.get_run(run)
        ledgers = opened.ledgers(record.run_id)
        trials = opened.runs(study=record.study, kind=RunKind.TRIAL) if record.study else []
    if as_json:
        print_json(show_document(record, ledgers))
    else:
        baseline = next((trial for trial in trials if trial.is_baseline), None)
        print_parts(describe_run(record, ledgers, baseline))
        if record.bench is not None:
            print_parts([bench_table(record.bench), *bench_lines(record.bench)])

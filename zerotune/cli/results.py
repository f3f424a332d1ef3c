"""``zerotune results``: the ranked table, any time later."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from zerotune.cli.console import print_json, print_parts, say
from zerotune.cli.options import Json, StoreOption
from zerotune.cli.reading import note_unreadable, open_store
from zerotune.config.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from zerotune.records import RunRecord, StudyRecord
    from zerotune.report.ranking import Row


class SortBy(StrEnum):
    """What the ranking is by."""

    THROUGHPUT = "throughput"
    MEMORY = "memory"


def results(
    study: Annotated[
        str | None, typer.Option("--study", metavar="S", help="Only the runs of this study.")
    ] = None,
    top: Annotated[
        int | None, typer.Option("--top", metavar="K", min=1, help="Only the first K ranks of each table.")
    ] = None,
    sort: Annotated[SortBy, typer.Option("--sort", help="What the ranking is by.")] = SortBy.THROUGHPUT,
    pareto: Annotated[
        bool,
        typer.Option("--pareto", help="Only runs that no other beats in throughput and memory together."),
    ] = False,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the runs as CSV.")] = False,
    store: StoreOption = None,
) -> None:
    """Rank the runs that were measured: one table for each workload and cluster, the youngest first."""
    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other", "give one of them")

    runs, studies = _read(store, study)
    tables = list(_tables(runs, studies, sort, top, pareto))
    if as_json:
        from zerotune.report.json_view import results_document

        print_json(results_document(row for rows in tables for row in rows))
    elif as_csv:
        from zerotune.report.csv_view import csv_text

        typer.echo(csv_text(row for rows in tables for row in rows), nl=False)
    else:
        whole = top is None and not pareto
        for rows in tables:
            print_parts(_render(rows, whole))
        if tables and (hints := _hints(tables, whole)) is not None:
            print_parts([hints])


def _read(option: str | None, study: str | None) -> tuple[list[RunRecord], list[StudyRecord]]:
    """The runs that are asked for; none, with a note, where there is no store yet."""
    from zerotune.store.trouble import NoStore

    try:
        with open_store(option) as store:
            if study is not None:
                store.get_study(study)
            runs, studies = store.runs(study=study), store.studies()
            note_unreadable(store)
            where = store.where
    except NoStore as error:
        if study is not None:
            raise
        say(str(error))
        return [], []
    if not runs:
        say(f"no results yet in {where} (run zerotune search)")
    return runs, studies


def _tables(
    runs: list[RunRecord], studies: list[StudyRecord], sort: SortBy, top: int | None, pareto: bool
) -> Iterator[list[Row]]:
    """The rows of each table: with ``top`` or ``pareto`` the ranked ones that are asked for, else all."""
    from zerotune.report.ranking import choose, rank_rows
    from zerotune.store.query import group

    for each in group(runs):
        rows = rank_rows(each.runs, studies, sort.value)
        yield rows if top is None and not pareto else choose(rows, top, pareto)


def _render(rows: list[Row], whole: bool) -> Iterator[Table | Text | None]:
    from rich.text import Text

    from zerotune.records import RunKind
    from zerotune.report.headline import headline
    from zerotune.report.ranking import choose
    from zerotune.report.tables import (
        table_of_benches,
        table_of_launches,
        table_of_left_out,
        table_of_ranked,
    )

    ranked = choose(rows)
    if ranked:
        yield table_of_ranked(ranked, headline(ranked[0].run))
    elif rows:
        yield Text(headline(rows[0].run), style="bold")
        if any(row.run.kind is not RunKind.BENCH for row in rows):
            yield Text("no feasible trial was measured")
    if whole:
        yield table_of_left_out(rows)
        yield table_of_launches(rows)
        yield table_of_benches(rows)


def _hints(tables: list[list[Row]], whole: bool) -> Text | None:
    """What one would do next; nothing where no run can be trained with."""
    from rich.text import Text

    best = next((row.run.run_id for rows in tables for row in rows if row.rank == 1), None)
    if best is None:
        return None
    lines = (
        [] if whole else ["(a selection; zerotune results shows every run, with what is not ranked and why)"]
    )
    commands = {
        "zerotune launch [MODEL.yaml]": "train with the best",
        f"zerotune show {best}": "all that is known of one run",
        "zerotune export best --to yaml": "the best as a model.yaml of its own",
    }
    width = max(len(command) for command in commands)
    for number, (command, meaning) in enumerate(commands.items()):
        lines.append(f"{'' if number else 'next:':6}{command:{width}}  {meaning}")
    return Text("\n".join(lines))

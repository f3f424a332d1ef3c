"""``zerotune export``: the configuration of a run, fully resolved, to use elsewhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerotune.cli.console import say
from zerotune.cli.options import StoreOption
from zerotune.cli.reading import open_store
from zerotune.config.errors import NothingFeasible, UsageError

if TYPE_CHECKING:
    from zerotune.records import RunRecord
    from zerotune.store.store import Store


class Target(StrEnum):
    """What the configuration is written for."""

    YAML = "yaml"


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN|best", help="Id of a run, or the beginning of one, or best.")
    ],
    to: Annotated[Target, typer.Option("--to", help="What to write.")] = Target.YAML,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write; stdout by default.")
    ] = None,
    study: Annotated[
        str | None, typer.Option("--study", metavar="S", help="With best: of this study.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Write the configuration of a run with every default and every auto written out, ready for launch."""
    from zerotune.config.dump import dump_job
    from zerotune.report.headline import provenance

    with open_store(store) as opened:
        record = _best(opened, study) if run == "best" else opened.get_run(run)
    if record.measurement is None:
        say(f"note: {record.run_id} was not measured, it ended as {record.status.value}")
    text = dump_job(record.config, header=provenance(record))
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}", "choose another --output") from None
    say(f"wrote {output}")


def _best(store: Store, study: str | None) -> RunRecord:
    """The best trial: of the study that is named, else of the latest one that has a feasible trial."""
    from zerotune.records import RunKind
    from zerotune.store.query import Sort, rank

    studies = [store.get_study(study)] if study is not None else store.studies()[::-1]
    for each in studies:
        sort: Sort = "memory" if each.objective == "memory" else "throughput"
        ranked = rank(store.runs(study=each.name, kind=RunKind.TRIAL), [each], sort)
        if ranked:
            others = (
                "" if len(studies) == 1 else f", the latest of {len(studies)} studies; --study picks another"
            )
            say(f"best is {ranked[0].run.run_id} of study {each.name}{others}")
            return ranked[0].run
    where = f"study {study}" if study is not None else store.where
    raise NothingFeasible(
        f"there is no feasible trial in {where}", "run zerotune search, or raise --memory-budget"
    )

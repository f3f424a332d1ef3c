"""``zerotune export``: the configuration of a run, fully resolved, or its weights, to use elsewhere."""

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
    """What is written: the configuration for a tool, or the weights."""

    YAML = "yaml"
    WEIGHTS = "weights"


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN|best", help="Id of a run, or the beginning of one, or best.")
    ],
    to: Annotated[Target, typer.Option("--to", help="What to write.")] = Target.YAML,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write; stdout by default, model.safetensors for weights.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="fp32|bf16|fp16", help="With weights: another dtype than that of training."
        ),
    ] = None,
    study: Annotated[
        str | None, typer.Option("--study", metavar="S", help="With best: of this study.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Write the configuration of a run with every default and every auto written out, or the weights it saved."""
    from zerotune.config.dump import dump_job
    from zerotune.report.headline import provenance

    if dtype is not None and to is not Target.WEIGHTS:
        raise UsageError("--dtype is for --to weights")
    with open_store(store) as opened:
        record = _best(opened, study) if run == "best" else opened.get_run(run)
        if to is Target.WEIGHTS:
            checkpoint = _checkpoint(opened, record, run == "best")
    if to is Target.WEIGHTS:
        _write_weights(checkpoint, output or Path("model.safetensors"), dtype)
        return
    if record.measurement is None and record.bench is None:
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


def _write_weights(checkpoint: Path, output: Path, dtype: str | None) -> None:
    from zerotune.checkpoints import export_weights

    export_weights(checkpoint, output, dtype)
    say(f"wrote {output} from {checkpoint}")


def _checkpoint(store: Store, record: RunRecord, of_workload: bool) -> Path:
    """The last complete checkpoint of a run; of a trial, which saves none, that of its workload's last launch.

    Raises:
        UsageError: There is none.
    """
    from zerotune.records import RunKind
    from zerotune.runs.resume import saved_by

    runs = [record]
    if of_workload:
        runs = store.runs(workload_key=record.workload.key, kind=RunKind.LAUNCH)[::-1]
    for run in runs:
        saved = saved_by(run.run_dir)
        if saved is not None:
            if run is not record:
                say(f"weights of {run.run_id}, the latest launch of this workload that saved some")
            return saved[1]
    whose = "this workload's launches have" if of_workload else f"run {record.run_id} has"
    raise UsageError(
        f"{whose} no complete checkpoint",
        "launch with train.save_every set, and name that run",
    )


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

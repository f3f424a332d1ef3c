"""``zerotune launch``: train with the best known configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerotune.cli.console import say
from zerotune.cli.interrupts import says_how_to_go_on
from zerotune.cli.job import batch_words, load, placement_words
from zerotune.cli.options import (
    Address,
    DryRun,
    Json,
    LocalNodes,
    ModelFile,
    Nodes,
    ProcsPerNode,
    Sets,
    StoreOption,
)
from zerotune.config.errors import RunFailed

if TYPE_CHECKING:
    from zerotune.config.schema import JobConfig
    from zerotune.runs.choose import Chosen
    from zerotune.runs.execute import Executed
    from zerotune.runs.session import Placement

_TAIL_LINES = 20


def launch(
    model: ModelFile = Path("model.yaml"),
    config: Annotated[
        str,
        typer.Option(
            "--config",
            metavar="best|default|RUN|FILE",
            help="Knobs to train with: the best known ones, those of MODEL.yaml, a run's, or a file's.",
        ),
    ] = "best",
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps to train.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the latest checkpoint of this workload.")
    ] = False,
    nodes: Nodes = None,
    procs_per_node: ProcsPerNode = None,
    local_nodes: LocalNodes = None,
    address: Address = None,
    store: StoreOption = None,
    sets: Sets = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train with the best configuration that is known, and say which that is."""
    loaded = load(model, sets or [], {"train.steps": steps})

    from zerotune.runs.session import Placement

    placement = Placement(nodes, procs_per_node, local_nodes, address)
    if dry_run:
        _print_plan(loaded.job, config, sets or [], placement, store, as_json)
        return
    saves = loaded.job.train.save_every is not None
    with says_how_to_go_on(
        "add --resume to go on from its last checkpoint" if saves else "nothing was saved"
    ):
        _launch(loaded.job, config, sets or [], resume, placement, store, as_json)


def _launch(
    job: JobConfig,
    config: str,
    sets: list[str],
    resume: bool,
    placement: Placement,
    store_option: str | None,
    as_json: bool,
) -> None:
    from zerotune.cli.console import err
    from zerotune.cli.live_launch import launch_view
    from zerotune.records import RunKind
    from zerotune.runs.choose import check_option, choose
    from zerotune.runs.execute import RunRequest
    from zerotune.runs.resume import latest_checkpoint
    from zerotune.runs.session import session
    from zerotune.search.sizes import model_sizes
    from zerotune.store.location import store_url
    from zerotune.store.store import Store
    from zerotune.train.spec import RunSpec
    from zerotune.train.workload import workload_fingerprint

    workload, block = workload_fingerprint(job), model_sizes(job).block
    with Store.open(store_url(store_option)) as opened:
        check_option(config, opened)
    with session(job, placement, store_url(store_option), say) as where:
        chosen = choose(config, job, sets, where.store, workload, where.fingerprint, block)
        _say_chosen(chosen)
        resumed = latest_checkpoint(where.store, workload, job) if resume else None
        if resumed is not None:
            say(f"resuming from run {resumed.run.run_id} after {resumed.step} steps")
        request = RunRequest(
            kind=RunKind.LAUNCH,
            spec=RunSpec(
                job=chosen.job,
                mode="train",
                run_dir="",
                resume_from=str(resumed.folder) if resumed else None,
            ),
            workload=workload,
            memory_budget=job.search.memory_budget,
        )
        with launch_view(err(), job.train.steps) as view:
            executed = where.executor.execute(request, view.show, view.started)
    _conclude(executed, as_json)


def _say_chosen(chosen: Chosen) -> None:
    say(f"configuration: {chosen.origin}")
    for caveat in chosen.caveats:
        say(f"note: {caveat}")


def _conclude(executed: Executed, as_json: bool) -> None:
    """Print what came of it.

    Raises:
        RunFailed: It failed; the message names rank, node and log.
    """
    from zerotune.cli.console import print_json
    from zerotune.report.json_view import plain, run_document

    run = executed.run
    if as_json:
        last = executed.losses[-1] if executed.losses else None
        print_json(
            run_document(run)
            | plain({"final_loss": last, "steps": run.steps_done, "checkpoint": run.checkpoint})
        )
    if run.failure is not None:
        _say_log(run.failure.log_path)
        see = f"see {run.failure.log_path or run.run_dir}"
        remedy = f"{run.failure.remedy}; {see}" if run.failure.remedy else see
        raise RunFailed(f"run {run.run_id} {run.status.value}: {run.failure.message}", remedy)
    if not as_json:
        _print_summary(executed)


def _say_log(path: str | None) -> None:
    """The last lines of the failing rank's log."""
    from zerotune.cluster.logs import tail

    text = tail(Path(path), _TAIL_LINES) if path else ""
    if text.strip():
        say(f"last lines of {path}:")
        for line in text.splitlines():
            say(f"  {line}")


def _print_summary(executed: Executed) -> None:
    from zerotune.cli.console import out
    from zerotune.report import format

    run, losses = executed.run, executed.losses
    lines = [f"run        {run.run_id}, {format.count(run.steps_done, 'step')}"]
    if losses:
        lines.append(f"loss       {losses[0]:.4f} -> {losses[-1]:.4f}")
    if run.measurement is not None:
        lines.append(f"speed      {format.number_interval(run.measurement.tokens_per_second)} tokens/s")
        lines.append(f"memory     {format.memory(run.measurement.peak_memory_bytes)} peak per rank")
    if run.feasible is False:
        lines.append(f"           over the memory budget of {format.memory(run.memory_budget)}")
    lines.append(f"checkpoint {run.checkpoint or 'none (set train.save_every)'}")
    lines.append(f"logs       {run.run_dir}")
    for line in lines:
        out().print(line, markup=False, soft_wrap=True)


def _print_plan(
    job: JobConfig,
    config: str,
    sets: list[str],
    placement: Placement,
    store_option: str | None,
    as_json: bool,
) -> None:
    """What a launch would do; nothing is started, and the store is only read."""
    from zerotune.cli.console import print_json
    from zerotune.config.check import batch_plan
    from zerotune.config.dump import dump_job
    from zerotune.runs.choose import choose
    from zerotune.runs.cluster_key import cluster_fingerprint, device_model
    from zerotune.runs.session import visible_gpus
    from zerotune.search.sizes import model_sizes
    from zerotune.store.location import store_url
    from zerotune.store.store import Store
    from zerotune.store.trouble import NoStore
    from zerotune.train.workload import workload_fingerprint

    gpus = visible_gpus()
    nodes, procs = placement.expected_shape(job, gpus)
    device = "gpu" if gpus else device_model(False)
    cluster = cluster_fingerprint(device, procs, nodes, job.cluster.link)
    workload, block = workload_fingerprint(job), model_sizes(job).block
    try:
        with Store.open(store_url(store_option), create=False) as store:
            chosen = choose(config, job, sets, store, workload, cluster, block)
    except NoStore:
        chosen = choose(config, job, sets, None, workload, cluster, block)
    train = chosen.job.train
    batch = batch_plan(train.global_batch_size, nodes * procs, train.micro_batch_size)
    if as_json:
        print_json(
            {
                "nodes": nodes,
                "procs_per_node": procs,
                "ranks": nodes * procs,
                "steps": train.steps,
                "accumulation": batch.accumulation,
                "origin": chosen.origin,
                "caveats": list(chosen.caveats),
                "config": chosen.job.model_dump(mode="json"),
            }
        )
        return
    header = [
        f"ranks          {placement_words(nodes, procs)} = {nodes * procs}",
        f"batch          {batch_words(chosen.job, batch, nodes * procs)}",
        f"steps          {train.steps}",
        f"configuration  {chosen.origin}",
        *(f"note           {caveat}" for caveat in chosen.caveats),
    ]
    typer.echo(dump_job(chosen.job, header), nl=False)
    say("dry run: nothing was started")

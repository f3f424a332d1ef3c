"""``zerotune search``: measure configurations and rank them."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerotune.cli.console import say
from zerotune.cli.interrupts import says_how_to_go_on
from zerotune.cli.job import batch_words, load, placement_arguments, placement_words
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
from zerotune.config.errors import NothingFeasible, RunFailed
from zerotune.config.space import Space, load_space

if TYPE_CHECKING:
    from zerotune.config.schema import JobConfig
    from zerotune.records.events import SearchResult
    from zerotune.report.ranking import Row
    from zerotune.runs.session import Placement
    from zerotune.search.plan import SearchPlan
    from zerotune.store.store import Store


class Objective(StrEnum):
    """What is searched for."""

    THROUGHPUT = "throughput"
    MEMORY = "memory"
    PARETO = "pareto"


class Sampler(StrEnum):
    """How configurations are suggested."""

    TPE = "tpe"
    RANDOM = "random"


_SEARCH = "Search"


def search(
    model: ModelFile = Path("model.yaml"),
    space: Annotated[
        str | None,
        typer.Option(
            "--space",
            metavar="NAME|FILE",
            help="Knobs to turn; see zerotune spaces.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", min=1, help="Finished trials wanted, over all sessions.", rich_help_panel=_SEARCH
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            "--time", metavar="10m", help="Time at most, over all sessions.", rich_help_panel=_SEARCH
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            "--memory-budget",
            metavar="40GiB",
            help="Peak memory that a rank may reach.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    objective: Annotated[
        Objective | None, typer.Option("--objective", help="What is best.", rich_help_panel=_SEARCH)
    ] = None,
    sampler: Annotated[
        Sampler | None, typer.Option("--sampler", help="Who suggests.", rich_help_panel=_SEARCH)
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of the sampler.", rich_help_panel=_SEARCH)
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            metavar="NAME",
            help="Name of the study; made from its question otherwise.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    nodes: Nodes = None,
    procs_per_node: ProcsPerNode = None,
    local_nodes: LocalNodes = None,
    address: Address = None,
    store: StoreOption = None,
    sets: Sets = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure configurations of the knobs, rank them, and write the best one to best.yaml.

    The same command again goes on where it was interrupted.
    """
    loaded = load(
        model,
        sets or [],
        {
            "search.space": space,
            "search.trials": trials,
            "search.time": time,
            "search.memory_budget": memory_budget,
            "search.objective": objective,
            "search.sampler": sampler,
            "search.seed": seed,
        },
    )
    job = loaded.job
    knobs = load_space(job.search.space)

    from zerotune.runs.session import Placement

    placement = Placement(nodes, procs_per_node, local_nodes, address)
    if dry_run:
        _print_plan(job, knobs, placement, as_json)
        return
    with says_how_to_go_on("finished trials are kept, run the same command to go on"):
        _search(job, knobs, model, placement, study, store, as_json)


def _search(
    job: JobConfig,
    space: Space,
    model: Path,
    placement: Placement,
    study: str | None,
    store_option: str | None,
    as_json: bool,
) -> None:
    from zerotune.cli.console import err
    from zerotune.cli.live import search_view
    from zerotune.runs.session import session
    from zerotune.search.plan import make_plan
    from zerotune.search.sizes import model_sizes
    from zerotune.search.study import Search
    from zerotune.store.location import store_url
    from zerotune.train.workload import workload_fingerprint

    workload, sizes = workload_fingerprint(job), model_sizes(job)
    with session(job, placement, store_url(store_option), say) as where:
        plan = make_plan(job, space, sizes, where.ranks, workload, where.fingerprint, study)
        for line in plan.notes:
            say(line)
        try:
            with search_view(err()) as view:
                result = Search(plan, where.store, where.executor, view.show).run()
        except (NothingFeasible, RunFailed):
            if not as_json:
                _print_tables(_rows(where.store, plan.study))
            raise
        path = _write_best(model.parent, result)
        rows = _rows(where.store, plan.study)
        if as_json:
            _print_json(result, rows, path)
        else:
            _print_tables(rows)
            _print_verdict(result, plan, path, model, placement)


# ---------------------------------------------------------------------------------------------------- the plan


def _print_plan(job: JobConfig, space: Space, placement: Placement, as_json: bool) -> None:
    """What a search would do; nothing is started and no cluster is asked."""
    from zerotune.cli.console import print_json
    from zerotune.config.check import batch_plan
    from zerotune.runs.cluster_key import cluster_fingerprint
    from zerotune.runs.session import visible_gpus
    from zerotune.search.configuration import acting_knobs
    from zerotune.search.plan import make_plan
    from zerotune.search.sizes import model_sizes
    from zerotune.train.workload import workload_fingerprint

    nodes, procs = placement.expected_shape(job, visible_gpus())
    cluster = cluster_fingerprint("unknown", procs, nodes, job.cluster.link)
    sizes = model_sizes(job)
    plan = make_plan(job, space, sizes, nodes * procs, workload_fingerprint(job), cluster)
    batch = batch_plan(job.train.global_batch_size, plan.ranks, job.train.micro_batch_size)
    baseline = acting_knobs(plan.baseline)
    if as_json:
        print_json(
            {
                "nodes": nodes,
                "procs_per_node": procs,
                "ranks": plan.ranks,
                "global_batch_size": job.train.global_batch_size,
                "micro_batch_size": batch.micro_batch_size,
                "accumulation": batch.accumulation,
                "model": {"parameters": sizes.model, "block": sizes.block},
                "space": {each.name: plan.values_in_numbers(each) for each in plan.space},
                "baseline": {name: str(value) for name, value in baseline.items()},
                "search": job.search.model_dump(mode="json"),
            }
        )
        return
    from zerotune.cli.console import out, print_parts

    lines = [
        f"ranks      {placement_words(nodes, procs)} = {plan.ranks}",
        f"model      {sizes.model:,} parameters, largest block {sizes.block:,}",
        f"batch      {batch_words(job, batch, plan.ranks)}",
        f"search     {job.search.trials} trials, objective {job.search.objective}, sampler {job.search.sampler}",
        *plan.notes,
    ]
    for line in lines:
        out().print(line, markup=False)
    print_parts([_space_table(plan, baseline)])
    say("dry run: nothing was started")


def _space_table(plan: SearchPlan, baseline: dict[str, Any]) -> Any:
    from rich.table import Table

    from zerotune.search.configuration import shown

    table = Table(title=f"space {plan.space.name}", title_justify="left", header_style="bold")
    table.add_column("knob", no_wrap=True)
    table.add_column("baseline", no_wrap=True)
    table.add_column("values", overflow="fold")
    searched = {each.name: each for each in plan.space}
    for name, value in baseline.items():
        values = plan.values_in_numbers(searched[name]) if name in searched else "as in the file"
        table.add_row(name, shown(value), values)
    for name in searched.keys() - baseline.keys():
        table.add_row(name, "", plan.values_in_numbers(searched[name]))
    return table


# -------------------------------------------------------------------------------------------------- the result


def _rows(store: Store, study: str) -> list[Row]:
    """The study's trials, ranked ones first."""
    from zerotune.report.ranking import rank_rows

    known = store.find_study(study)
    if known is None:
        return []
    sort: Any = "memory" if known.objective == Objective.MEMORY else "throughput"
    return rank_rows(store.runs(study=study), [known], sort)


def _print_tables(rows: list[Row]) -> None:
    from zerotune.cli.console import print_parts
    from zerotune.report.headline import headline
    from zerotune.report.ranking import choose
    from zerotune.report.tables import table_of_left_out, table_of_ranked

    if ranked := choose(rows):
        print_parts([table_of_ranked(ranked, headline(ranked[0].run))])
    if (left_out := table_of_left_out(rows)) is not None:
        print_parts([left_out])


def _write_best(folder: Path, result: SearchResult) -> Path | None:
    """Write best.yaml beside model.yaml; a folder that cannot be written is no reason to lose the answer."""
    from zerotune.cli.console import warn
    from zerotune.search.best import FILE_NAME, write_best

    try:
        return write_best(folder, result)
    except OSError as error:
        warn(
            f"{folder / FILE_NAME} cannot be written: {error.strerror} (zerotune export best --to yaml prints it)"
        )
        return None


def _print_verdict(
    result: SearchResult, plan: SearchPlan, path: Path | None, model: Path, placement: Placement
) -> None:
    from zerotune.cli.console import out
    from zerotune.report import format
    from zerotune.search.verdict import verdict

    lines = [verdict(result, plan.search.objective)]
    if result.ended_because == "exhausted":
        lines.append(f"the space {plan.space.name} has no more configurations than these")
    if result.ended_because == "time":
        lines.append("the time is spent: raise --time to go on")
    if path is not None:
        lines.append(f"wrote {path}: the best configuration, every value written out")
    lines.append(f"took {format.duration(result.wall_seconds)}, all sessions together")
    file = "" if model == Path("model.yaml") else f" {shlex.quote(str(model))}"
    lines.append(f"next: zerotune launch{file}{placement_arguments(placement)}")
    console = out()
    for number, line in enumerate(lines):
        # Words of the verdict may wrap; a path or a command is to be copied.
        console.print(line, markup=False, soft_wrap=number > 0)


def _print_json(result: SearchResult, rows: list[Row], path: Path | None) -> None:
    from zerotune.cli.console import print_json
    from zerotune.report.json_view import row_document

    documents = {row.run.run_id: row_document(row) for row in rows}
    speedup = result.speedup
    print_json(
        {
            "study": result.study,
            "trials": result.counts,
            "baseline": documents[result.baseline.run_id] if result.baseline else None,
            "best": documents[result.best.run_id],
            "speedup": speedup.value if speedup else None,
            "speedup_ci": [speedup.low, speedup.high] if speedup else None,
            "rounds_in_turns": result.confirmed[0].rounds if result.confirmed else 0,
            "is_tie": result.is_tie,
            "reference": result.reference,
            "pareto": [documents[row.run.run_id] for row in rows if row.pareto],
            "ended_because": result.ended_because,
            "best_yaml": str(path) if path else None,
            "wall_seconds": result.wall_seconds,
        }
    )

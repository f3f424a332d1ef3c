"""``zerotune bench``: engines in turns within one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerotune.cli.console import say
from zerotune.cli.interrupts import says_how_to_go_on
from zerotune.cli.job import load
from zerotune.cli.options import (
    Address,
    Json,
    LocalNodes,
    ModelFile,
    Nodes,
    ProcsPerNode,
    Sets,
    StoreOption,
)
from zerotune.config.errors import UsageError
from zerotune.records.bench import PEERS

if TYPE_CHECKING:
    from zerotune.config.schema import JobConfig
    from zerotune.runs.session import Placement
    from zerotune.train.context import Progress

_DEFAULT_ENGINES = "zerotune,ddp,fsdp2,deepspeed"


def bench(
    model: ModelFile = Path("model.yaml"),
    engines: Annotated[
        str,
        typer.Option(
            "--engines",
            help=f"zerotune, zerotune:VARIANT, {', '.join(PEERS)}.",
        ),
    ] = _DEFAULT_ENGINES,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="NAME=FILE|a.b=v[,a.b=v]",
            help="Knobs of zerotune:NAME: of a model.yaml such as best.yaml, or set here; may be repeated.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Times that each engine is measured.")] = 10,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of one measurement.")] = 3,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            metavar="RATE",
            help="Two hosts on this machine with a link of this rate between them: 2gbit, 500mbit.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.html", help="Write a plot of it.")
    ] = None,
    nodes: Nodes = None,
    procs_per_node: ProcsPerNode = None,
    local_nodes: LocalNodes = None,
    address: Address = None,
    store: StoreOption = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Measure engines in turns: ours, DDP, FSDP2, DeepSpeed."""
    from zerotune.runs.session import Placement

    job = load(model, sets or [], {}).job
    names = _names(engines)
    jobs = {
        f"zerotune:{name}": _variant(job, model, sets or [], what)
        for name, what in _variants(variants or []).items()
    }
    for name in names:
        if name.startswith("zerotune:") and name not in jobs:
            raise UsageError(
                f"--engines {name}: there is no such variant",
                f"say what it is: --variant {name.removeprefix('zerotune:')}=best.yaml",
            )
    placement = Placement(nodes, procs_per_node, local_nodes, address)
    rate = None
    if link is not None:
        from zerotune.cluster.shaped_link import bits_per_second

        rate = bits_per_second(link)
        say(f"two hosts on this machine, {link} between them")
    with says_how_to_go_on("zerotune results says what is kept of it"):
        _bench(job, names, jobs, rounds, steps, rate, plot, placement, store, as_json)


def _names(engines: str) -> tuple[str, ...]:
    """Names as given, ours first: ratios are of ours to the others'."""
    names = list(dict.fromkeys(name.strip() for name in engines.split(",") if name.strip()))
    ours = [name for name in names if name.split(":")[0] == "zerotune"]
    if not ours:
        raise UsageError("--engines has no zerotune in it", "everything is compared with it")
    for name in names:
        if name not in ours and name not in PEERS:
            raise UsageError(
                f"--engines: there is no engine {name}", f"take some of zerotune, {', '.join(PEERS)}"
            )
    return (*ours, *(name for name in names if name not in ours))


def _variants(given: list[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, equals, what = text.partition("=")
        if not (name and equals and what):
            raise UsageError(f"--variant {text} is not NAME=FILE or NAME=a.b=v", "--variant best=best.yaml")
        pairs[name] = what
    return pairs


def _variant(job: JobConfig, model: Path, sets: list[str], what: str) -> JobConfig:
    """The workload of ``job`` with the knobs of another file, or with some of them set."""
    from zerotune.config.load import load_job

    if "=" in what:
        return load_job(model, [*sets, *what.split(",")]).job
    knobs = load_job(Path(what), []).job.knobs
    return job.with_knobs(
        knobs | {"micro_batch_size": job.train.micro_batch_size}
    )  # the same for all engines


def _bench(
    job: JobConfig,
    names: tuple[str, ...],
    variants: dict[str, JobConfig],
    rounds: int,
    steps: int,
    rate: float | None,
    plot: Path | None,
    placement: Placement,
    store_option: str | None,
    as_json: bool,
) -> None:
    from zerotune.cli.console import print_json, print_parts
    from zerotune.report.bench import bench_document, bench_lines, bench_table, write_plot
    from zerotune.runs.bench import bench as run
    from zerotune.store.location import store_url
    from zerotune.train.bench import BenchSpec

    spec = BenchSpec(
        job=job, engines=names, variants=variants, run_dir="", rounds=rounds, steps_per_round=steps
    )
    record = run(spec, placement, store_url(store_option), rate, say, _Progress())
    report = record.bench
    assert report is not None, "it is complete"
    if plot is not None:
        write_plot(report, plot)
        say(f"wrote {plot}")
    if as_json:
        print_json({"run_id": record.run_id, **bench_document(report)})
    else:
        print_parts([bench_table(report), *bench_lines(report)])
    say(f"zerotune show {record.run_id} shows it again; logs in {record.run_dir}")


class _Progress:
    """One line for every round."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def __call__(self, progress: Progress) -> None:
        now = (progress.phase, progress.step)
        if now != self._last:
            self._last = now
            of = f" {progress.step + 1} of {progress.steps}" if progress.steps else ""
            say(f"{progress.phase}{of}")

"""Which configuration a launch takes, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotune.config.check import batch_plan
from zerotune.config.errors import UsageError
from zerotune.config.knobs import REGISTRY
from zerotune.config.load import load_job
from zerotune.config.schema import JobConfig
from zerotune.records import Fingerprint
from zerotune.schedule import resolve_knobs
from zerotune.store.query import best_for
from zerotune.store.store import Store

BEST = "best"
DEFAULT = "default"

_MICRO = "micro_batch_size"


@dataclass(frozen=True)
class Chosen:
    """A configuration to launch.

    Attributes:
        job: Every knob a number.
        origin: Where the knobs come from and why, one line.
        caveats: What speaks against them, one line each.
    """

    job: JobConfig
    origin: str
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Source:
    """Knobs from somewhere, not fitted to these ranks yet."""

    knobs: dict[str, Any]
    origin: str
    caveats: tuple[str, ...] = ()


def check_option(option: str, store: Store | None) -> None:
    """Refuse a configuration that does not exist, before a cluster is asked for anything.

    Raises:
        UsageError: There is no such run or file, or the file is wrong.
    """
    if option in (BEST, DEFAULT):
        return
    if _is_file(option):
        load_job(option)
    elif store is None:
        raise _no_results(option)
    else:
        store.get_run(option)


def choose(
    option: str,
    job: JobConfig,
    sets: Sequence[str],
    store: Store | None,
    workload: Fingerprint,
    cluster: Fingerprint,
    block: int,
) -> Chosen:
    """Choose the configuration of a launch.

    Args:
        option: ``best``, ``default``, a run id or a file.
        job: model.yaml, ``sets`` merged into it.
        sets: The ``--set`` options; knobs among them win over whatever is chosen.
        store: Where results are, if there are any yet.
        workload: What will be trained.
        cluster: Where.
        block: Elements of the largest block, which ``auto`` stands for.

    Raises:
        UsageError: There is no such run or file, or the batch does not divide.
    """
    source = _source(option, job, store, workload, cluster)
    source = _with_sets(source, job, sets)
    ranks = int(cluster.facts["nodes"]) * int(cluster.facts["ranks_per_node"])
    micro, caveats = _fitting_micro_batch(source, job, ranks)
    fitted = job.with_knobs({**source.knobs, _MICRO: micro})
    resolved = fitted.model_copy(update={"zero": resolve_knobs(fitted.zero, block)})
    return Chosen(resolved, source.origin, source.caveats + caveats)


def _source(
    option: str, job: JobConfig, store: Store | None, workload: Fingerprint, cluster: Fingerprint
) -> _Source:
    own = _Source(job.knobs, "the knobs of the file, defaults where it is silent")
    if option == DEFAULT:
        return own
    if option == BEST:
        best = best_for(store, workload, cluster, job.search.memory_budget) if store else None
        if best is None:
            return replace(own, origin=f"{own.origin}; nothing of this workload was searched yet")
        knobs = _of(best.run.config, f"run {best.run.run_id}, {best.reason}")
        return replace(knobs, caveats=(best.caveat,) if best.caveat else ())
    if _is_file(option):
        return _of(load_job(option).job, f"the file {option}")
    if store is None:
        raise _no_results(option)
    run = store.get_run(option)
    caveats = []
    if run.workload.key != workload.key:
        caveats.append(f"run {run.run_id} trained another workload")
    if run.cluster.key != cluster.key:
        differing = ", ".join(run.cluster.difference(cluster))
        caveats.append(f"run {run.run_id} ran on another cluster ({differing})")
    return replace(_of(run.config, f"run {run.run_id}, as asked for"), caveats=tuple(caveats))


def _is_file(option: str) -> bool:
    return Path(option).suffix in (".yaml", ".yml") or Path(option).is_file()


def _no_results(option: str) -> UsageError:
    return UsageError(f"no run {option!r}: there are no results yet", "run zerotune search")


def _of(config: JobConfig, origin: str) -> _Source:
    return _Source(config.knobs, origin)


def _with_sets(source: _Source, job: JobConfig, sets: Sequence[str]) -> _Source:
    """Knobs that were set on the command line are taken from the job, which has them."""
    paths = {each.partition("=")[0].strip() for each in sets}
    names = [name for name, info in REGISTRY.items() if info.path in paths]
    if not names:
        return source
    set_here = {name: job.knobs[name] for name in names}
    origin = f"{source.origin}; with {', '.join(names)} from --set"
    return replace(source, knobs=source.knobs | set_here, origin=origin)


def _fitting_micro_batch(source: _Source, job: JobConfig, ranks: int) -> tuple[int, tuple[str, ...]]:
    """The micro-batch, or the nearest smaller one that divides if it comes from another number of ranks."""
    whole, wanted = job.train.global_batch_size, source.knobs[_MICRO]
    if wanted is None or wanted == job.train.micro_batch_size:
        return batch_plan(whole, ranks, wanted).micro_batch_size, ()
    per_rank = batch_plan(whole, ranks, None).micro_batch_size
    fitting = max(size for size in range(1, min(wanted, per_rank) + 1) if per_rank % size == 0)
    if fitting == wanted:
        return wanted, ()
    return fitting, (
        f"micro_batch_size {fitting} instead of {wanted}, which does not divide over {ranks} ranks",
    )

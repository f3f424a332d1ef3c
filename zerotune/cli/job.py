"""What ``search`` and ``launch`` share before anything runs: the job with the options of the command line in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerotune.cli.console import warn
from zerotune.config.load import Loaded, load_job

if TYPE_CHECKING:
    from zerotune.config.check import BatchPlan
    from zerotune.config.schema import JobConfig
    from zerotune.runs.session import Placement


def load(path: Path, sets: Sequence[str], options: Mapping[str, object]) -> Loaded:
    """Read model.yaml with ``--set`` and the command's own options over it, and print its warnings.

    Args:
        path: The file.
        sets: The ``--set`` options.
        options: Values of other options by the path that they stand for; ``None`` leaves the file's.

    Raises:
        ConfigErrors: All that is wrong.
    """
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    loaded = load_job(path, [*sets, *given])
    for line in loaded.warnings:
        warn(line)
    return loaded


def placement_words(nodes: int, procs: int) -> str:
    """``2 nodes x 4 ranks``."""
    return f"{nodes} node{'' if nodes == 1 else 's'} x {procs} rank{'' if procs == 1 else 's'}"


def batch_words(job: JobConfig, plan: BatchPlan, ranks: int) -> str:
    """``8 = 2 ranks x 4 samples x 1 micro-batch``."""
    return (
        f"{job.train.global_batch_size} = {ranks} ranks x {plan.micro_batch_size} samples"
        f" x {plan.accumulation} micro-batches"
    )


def placement_arguments(placement: Placement) -> str:
    """The placement options as they were typed, to suggest the next command."""
    named = {
        "--nodes": placement.nodes,
        "--procs-per-node": placement.procs_per_node,
        "--local-nodes": placement.local_nodes,
        "--address": placement.address,
    }
    return "".join(f" {name} {value}" for name, value in named.items() if value is not None)

"""What a search asks. A study answers one question; a resumed search must ask the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zerotune.config.errors import UsageError
from zerotune.config.knobs import REGISTRY
from zerotune.config.schema import JobConfig
from zerotune.records import Fingerprint, StudyRecord
from zerotune.runs.versions import versions

# Figures that two versions of these measured are not figures of one thing.
_VERSIONS = ("zerotune", "torch")


def question(
    job: JobConfig, space: Mapping[str, Any], workload: Fingerprint, cluster: Fingerprint
) -> Fingerprint:
    """The fingerprint of a search.

    The number of trials, the time and what only bounds a run's patience are left out, so that a search can be
    continued with more of them.

    Args:
        job: The configuration, command-line options merged into it.
        space: The search space, plain values only.
        workload: What is trained.
        cluster: Where.
    """
    search, known = job.search, versions()
    return Fingerprint.of(
        {
            "space": dict(space),
            "objective": search.objective,
            "memory_budget": search.memory_budget,
            "sampler": {"name": search.sampler, "seed": search.seed},
            "workload": workload.facts,
            "cluster": cluster.facts,
            "zero": job.zero.model_dump(mode="json"),
            "train": {name: job.knobs[name] for name, info in REGISTRY.items() if info.section == "train"},
            "engine": job.train.engine,
            "measuring": {
                "warmup_steps": search.warmup_steps,
                "min_steps": search.min_steps,
                "max_steps": search.max_steps,
            },
            "versions": {name: known.get(name, "unknown") for name in _VERSIONS},
        }
    )


def study_name(job: JobConfig, cluster: Fingerprint, asked: Fingerprint) -> str:
    """A name that can be read and typed, and differs wherever the question differs."""
    kind = next(name for name in type(job.model).model_fields if getattr(job.model, name) is not None)
    ranks = f"{cluster.facts['nodes']}x{cluster.facts['ranks_per_node']}"
    return f"{kind}-{job.search.objective}-{ranks}-{asked.key[:8]}"


def check_same_question(known: StudyRecord, asked: Fingerprint) -> None:
    """Refuse to mix two questions in one study.

    Raises:
        UsageError: They differ; the message shows where.
    """
    if known.fingerprint.key == asked.key:
        return
    lines = [
        f"  {path}: {_shown(before)} in the study, {_shown(after)} now"
        for path, before, after in _differences(known.fingerprint.facts, asked.facts)
    ]
    raise UsageError(
        "\n".join([f"study {known.name!r} asked another question:", *lines]),
        "give another --study name, or none to get one of its own",
    )


_ABSENT = object()


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else "none" if value is None else str(value)


def _differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ, as ``(dotted path, before, after)``."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            inner = f"{path}.{name}" if path else name
            yield from _differences(before.get(name, _ABSENT), after.get(name, _ABSENT), inner)
    elif before != after:
        yield path, before, after

"""Questions asked of runs: which is best, which are on the front, which to launch. Pure functions of records."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zerotune.records import Fingerprint, Measurement, RunKind, RunRecord, Status, StudyRecord

if TYPE_CHECKING:
    from zerotune.store.store import Store

Sort = Literal["throughput", "memory"]


@dataclass(frozen=True)
class Ranked:
    """A run with its place.

    Attributes:
        run: Complete and feasible.
        rank: Its place, from 1 on.
        is_tied: Whether its throughput cannot be told from that of a neighbour in the ranking, so that memory
            decided between them.
        pareto: Whether no other run is at least as fast with at most as much memory, and better in one of them.
        is_winner: Whether its study confirmed it, in turns, as the best.
    """

    run: RunRecord
    rank: int
    is_tied: bool
    pareto: bool
    is_winner: bool


@dataclass(frozen=True)
class Group:
    """Runs that may be compared: of one workload on one cluster."""

    workload: Fingerprint
    cluster: Fingerprint
    runs: tuple[RunRecord, ...]


@dataclass(frozen=True)
class Choice:
    """A run to take the configuration from, and why it.

    Attributes:
        run: The run.
        reason: One line, e.g. ``best of 14 trials of study gpt-1a2b``.
        caveat: What speaks against it, e.g. ``measured on 1 node, not 2``; ``None`` if nothing does.
    """

    run: RunRecord
    reason: str
    caveat: str | None = None


def group(runs: Iterable[RunRecord]) -> list[Group]:
    """Runs by workload and cluster, the group with the youngest run first, each in the given order."""
    found: dict[tuple[str, str], list[RunRecord]] = {}
    for run in runs:
        found.setdefault((run.workload.key, run.cluster.key), []).append(run)
    by_age = sorted(found.values(), key=lambda members: max(run.created for run in members), reverse=True)
    return [Group(members[0].workload, members[0].cluster, tuple(members)) for members in by_age]


def is_candidate(run: RunRecord) -> bool:
    """Whether a run can be ranked: it is complete, was measured, and is not over its memory budget."""
    return run.status is Status.COMPLETE and run.measurement is not None and run.feasible is not False


def winners(studies: Iterable[StudyRecord], sort: Sort | None = None) -> set[str]:
    """Run ids that studies confirmed as best; with ``sort``, only by studies that asked the same question."""
    wanted = {None: None, "throughput": ("throughput", "pareto"), "memory": ("memory",)}[sort]
    return {study.best for study in studies if study.best and (wanted is None or study.objective in wanted)}


def rank(runs: Iterable[RunRecord], winners: Collection[str] = (), sort: Sort = "throughput") -> list[Ranked]:
    """Rank the candidates among runs of one workload on one cluster, best first.

    By throughput; runs whose intervals overlap that of the fastest of them are a tie, in which the smaller peak of
    memory goes first. A run that its study confirmed in turns goes before unconfirmed higher numbers of the same
    study, because measurements minutes apart compare the machine's moods as much as the configurations.

    Args:
        runs: Of one workload and cluster; those that are no candidates are passed over.
        winners: Run ids that their studies confirmed.
        sort: ``memory`` ranks by peak memory, then by throughput.

    Raises:
        ValueError: The runs are of several workloads or clusters, which are never ranked together.
    """
    runs = list(runs)
    if len(group(runs)) > 1:
        raise ValueError(
            "runs of different workloads or clusters cannot be ranked together; group them first"
        )
    candidates = [run for run in runs if is_candidate(run)]
    tied: set[str] = set()
    if sort == "memory":
        ordered = sorted(candidates, key=_memory_first)
    else:
        ordered = []
        for tie in _ties(candidates):
            ordered += sorted(tie, key=_memory_first)
            tied |= {run.run_id for run in tie} if len(tie) > 1 else set()
    front = {run.run_id for run in pareto(candidates)}
    return [
        Ranked(run, place, run.run_id in tied, run.run_id in front, run.run_id in winners)
        for place, run in enumerate(_promote(ordered, winners), start=1)
    ]


def pareto(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """The candidates that no other beats in throughput and peak memory together, fastest first.

    Of several with the very same figures all are on the front.
    """
    front: list[RunRecord] = []
    for run in sorted((run for run in runs if is_candidate(run)), key=_speed_first):
        least = front[-1] if front else None
        if (
            least is None
            or _peak(run) < _peak(least)
            or (_speed(run), _peak(run)) == (_speed(least), _peak(least))
        ):
            front.append(run)
    return front


def best_for(
    store: Store, workload: Fingerprint, cluster: Fingerprint, memory_budget: int | None = None
) -> Choice | None:
    """The run whose configuration a launch should take.

    The best trial of this workload on this cluster; failing that, the best on the nearest cluster: the same
    device first, then the nearest number of ranks.

    Args:
        store: Where to look.
        workload: What will be trained.
        cluster: Where.
        memory_budget: Bytes; runs above it are passed over.

    Returns:
        The run with the reason, or ``None`` if no trial of this workload is known.
    """
    trials = [
        run
        for run in store.runs(workload_key=workload.key, kind=RunKind.TRIAL)
        if is_candidate(run) and (memory_budget is None or _peak(run) <= memory_budget)
    ]
    confirmed = winners(store.studies(workload_key=workload.key))
    nearest = min(group(trials), key=lambda each: _distance(each.cluster, cluster), default=None)
    if nearest is None:
        return None
    ranked = rank(nearest.runs, confirmed)
    best = ranked[0]
    origin = f" of study {best.run.study}" if best.run.study else ""
    how = "confirmed as the best" if best.is_winner else "the best"
    caveat = _caveat(nearest.cluster, cluster)
    return Choice(best.run, f"{how} of {_count(len(ranked), 'trial')}{origin}", caveat)


def _count(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _measured(run: RunRecord) -> Measurement:
    assert run.measurement is not None, "only candidates are compared"
    return run.measurement


def _speed(run: RunRecord) -> float:
    return _measured(run).tokens_per_second.value


def _peak(run: RunRecord) -> int:
    return _measured(run).peak_memory_bytes


# Both end in the id, so that an order never depends on the order of the input.
def _speed_first(run: RunRecord) -> tuple[float, int, str]:
    return -_speed(run), _peak(run), run.run_id


def _memory_first(run: RunRecord) -> tuple[int, float, str]:
    return _peak(run), -_speed(run), run.run_id


def _ties(candidates: Iterable[RunRecord]) -> list[list[RunRecord]]:
    """Cut the order of speed into ties: each takes the runs after its fastest as long as they overlap with it."""
    ties: list[list[RunRecord]] = []
    for run in sorted(candidates, key=_speed_first):
        interval = _measured(run).tokens_per_second
        if ties and interval.overlaps(_measured(ties[-1][0]).tokens_per_second):
            ties[-1].append(run)
        else:
            ties.append([run])
    return ties


def _promote(ordered: Sequence[RunRecord], winners: Collection[str]) -> list[RunRecord]:
    """Move each confirmed run to where the first run of its study stands; the others keep their order."""
    result = list(ordered)
    for winner in ordered:
        if winner.run_id not in winners or winner.study is None:
            continue
        first = next(place for place, run in enumerate(result) if run.study == winner.study)
        result.remove(winner)
        result.insert(first, winner)
    return result


def _distance(measured: Fingerprint, wanted: Fingerprint) -> tuple[bool, bool, float, int, str]:
    differing = measured.difference(wanted)
    apart = abs(math.log2(_ranks(measured) / _ranks(wanted)))
    return measured.key != wanted.key, "device" in differing, apart, len(differing), measured.key


def _ranks(cluster: Fingerprint) -> int:
    return int(cluster.facts.get("nodes", 1)) * int(cluster.facts.get("ranks_per_node", 1))


def _caveat(measured: Fingerprint, wanted: Fingerprint) -> str | None:
    """``measured on 1 node, not 2``."""
    words = []
    for name, (there, here) in measured.difference(wanted).items():
        match name:
            case "nodes":
                words.append(f"{_count(there, 'node')}, not {here}")
            case "ranks_per_node":
                words.append(f"{_count(there, 'rank')} per node, not {here}")
            case "link":
                words.append(f"link {there}, not {here}")
            case _:
                words.append(f"{there}, not {here}")
    return "measured on " + "; ".join(words) if words else None

"""Questions asked of runs: which is best, which are on the front, which to launch. Pure functions of records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zerotune.records import (
    Confirmed,
    Fingerprint,
    Interval,
    Measurement,
    RunKind,
    RunRecord,
    Status,
    StudyRecord,
)

if TYPE_CHECKING:
    from zerotune.store.store import Store

Sort = Literal["throughput", "memory"]
Order = Literal["throughput", "memory", "speed"]
"""What an order is by; ``speed`` is throughput without ties."""


@dataclass(frozen=True)
class Ranked:
    """A run with its place.

    Attributes:
        run: Complete and feasible.
        rank: Its place, from 1 on.
        is_tied: Whether its throughput cannot be told from that of a neighbour in the ranking, so that memory
            decided between them.
        pareto: Whether no other run is at least as fast with at most as much memory, and better in one of them;
            among runs that were measured in turns by what was found there.
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


def rank(
    runs: Iterable[RunRecord], studies: Iterable[StudyRecord] = (), sort: Sort | None = "throughput"
) -> list[Ranked]:
    """Rank the candidates among runs of one workload on one cluster, best first.

    By throughput; runs whose intervals overlap that of the fastest of them are a tie, in which the smaller peak of
    memory goes first. What a study measured in turns goes by its paired ratios, and before the study's other runs,
    because measurements minutes apart compare the machine's moods as much as the configurations. Only a reference
    that all others beat has its place among the study's other runs: it was measured again whatever its speed.

    Args:
        runs: Of one workload and cluster; those that are no candidates are passed over.
        studies: Their studies, for what they confirmed. It counts where a study asked what the ranking is by.
        sort: ``memory`` ranks by peak memory, then by throughput; ``None`` each study by its own objective, and
            studies among each other by throughput.

    Raises:
        ValueError: The runs are of several workloads or clusters, which are never ranked together.
    """
    runs, studies = list(runs), list(studies)
    if len(group(runs)) > 1:
        raise ValueError(
            "runs of different workloads or clusters cannot be ranked together; group them first"
        )
    candidates = [run for run in runs if is_candidate(run)]
    orders = {study.name: _order_of(study, sort) for study in studies}
    winners = {study.best for study in studies if sort is None or _sort_of(study) == sort}
    ordered, tied = _ordered(candidates, orders, sort or "throughput")
    front = {run.run_id for run in pareto(candidates, studies)}
    return [
        Ranked(run, place, run.run_id in tied, run.run_id in front, run.run_id in winners)
        for place, run in enumerate(ordered, start=1)
    ]


def ties_in_turns(
    runs: Iterable[RunRecord], confirmed: Mapping[str, Confirmed], by: Order = "throughput"
) -> list[list[RunRecord]]:
    """The ranking of runs that were measured in turns, in ties: the very first run is the winner.

    Args:
        runs: Measured runs, each with an entry in ``confirmed``.
        confirmed: What the turns say, by run id.
        by: By throughput, runs whose paired interval overlaps that of the fastest of them are a tie, in which
            the smaller peak goes first; by speed there are no ties. By memory the smaller peak goes first, and of
            equal ones the faster.
    """

    def speed_first(run: RunRecord) -> tuple[float, int, str]:
        return -confirmed[run.run_id].speedup.value, _peak(run), run.run_id

    def memory_first(run: RunRecord) -> tuple[int, float, str]:
        return _peak(run), -confirmed[run.run_id].speedup.value, run.run_id

    if by != "throughput":
        return [[run] for run in sorted(runs, key=memory_first if by == "memory" else speed_first)]
    ties = _cut(sorted(runs, key=speed_first), lambda run: confirmed[run.run_id].speedup)
    return [sorted(tie, key=memory_first) for tie in ties]


def pareto(runs: Iterable[RunRecord], studies: Iterable[StudyRecord] = ()) -> list[RunRecord]:
    """The candidates that no other beats in throughput and peak memory together, fastest first.

    Of several with the very same figures all are on the front. What a study measured in turns counts as it came
    out there, as in :func:`rank`.
    """
    orders = {study.name: _Own(study, "speed") for study in studies if _sort_of(study) == "throughput"}
    front: list[RunRecord] = []
    for run in _ordered([run for run in runs if is_candidate(run)], orders, "speed")[0]:
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
    nearest = min(group(trials), key=lambda each: _distance(each.cluster, cluster), default=None)
    if nearest is None:
        return None
    ranked = rank(nearest.runs, store.studies(workload_key=workload.key), sort=None)
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


@dataclass(frozen=True)
class _Own:
    """A study whose own order its runs take among themselves, and what that is by."""

    study: StudyRecord
    by: Order


def _sort_of(study: StudyRecord) -> Sort:
    return "memory" if study.objective == "memory" else "throughput"


def _order_of(study: StudyRecord, sort: Sort | None) -> _Own | None:
    """How a ranking orders the runs of a study; ``None`` where it asked another question than the ranking."""
    own = _sort_of(study)
    return _Own(study, own) if sort is None or own == sort else None


def _ordered(
    candidates: Iterable[RunRecord], orders: Mapping[str, _Own | None], by: Order
) -> tuple[list[RunRecord], set[str]]:
    """Runs in order, and the ids of those that are in a tie.

    Measurements decide which places each study has among all of them, its own order who takes which of them.
    """
    ties = _ties(candidates, by)
    tied = {run.run_id for tie in ties if len(tie) > 1 for run in tie}
    ordered = [run for tie in ties for run in tie]
    for name, order in orders.items():
        if order is None:
            continue
        places = [place for place, run in enumerate(ordered) if run.study == name]
        ties = _study_ties([ordered[place] for place in places], order)
        own = [run for tie in ties for run in tie]
        tied -= {run.run_id for run in own}
        tied |= {run.run_id for tie in ties if len(tie) > 1 for run in tie}
        for place, run in zip(places, own, strict=True):
            ordered[place] = run
    return ordered, tied


def _study_ties(runs: Sequence[RunRecord], order: _Own) -> list[list[RunRecord]]:
    """The order of a study: what was measured in turns, then all others by their own measurements."""
    confirmed = {each.run_id: each for each in order.study.confirmed}
    in_turns = [run for run in runs if run.run_id in confirmed]
    ties = ties_in_turns(in_turns, confirmed, order.by)
    if not confirmed:  # a row of a version that kept the winner alone
        ties = [[run] for run in runs if run.run_id == order.study.best]
    elif ties and len(ties[-1]) == 1 and confirmed[ties[-1][0].run_id].is_reference:
        ties.pop()
    first = {run.run_id for tie in ties for run in tie}
    return ties + _ties([run for run in runs if run.run_id not in first], order.by)


def _ties(runs: Iterable[RunRecord], by: Order) -> list[list[RunRecord]]:
    """Runs in the order of what was measured of each, in ties."""
    if by == "memory":
        return [[run] for run in sorted(runs, key=_memory_first)]
    fastest_first = sorted(runs, key=_speed_first)
    if by == "speed":
        return [[run] for run in fastest_first]
    ties = _cut(fastest_first, lambda run: _measured(run).tokens_per_second)
    return [sorted(tie, key=_memory_first) for tie in ties]


def _cut(
    fastest_first: Iterable[RunRecord], interval: Callable[[RunRecord], Interval]
) -> list[list[RunRecord]]:
    """Cut an order of speed into ties: each takes the runs after its fastest as long as they overlap with it."""
    ties: list[list[RunRecord]] = []
    for run in fastest_first:
        if ties and interval(run).overlaps(interval(ties[-1][0])):
            ties[-1].append(run)
        else:
            ties.append([run])
    return ties


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

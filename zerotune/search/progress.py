"""What a study has finished, from the rows of the store alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from zerotune.records import RunKind, RunRecord, Status
from zerotune.search.configuration import canonical_key
from zerotune.store.store import Store

# A node that was lost says nothing about the configuration, which is tried once more. Twice in the same place is
# taken for an answer.
_SECOND_CHANCE = (Status.LOST_NODE,)
_NO_ANSWER = (Status.RUNNING, Status.INTERRUPTED, Status.NOT_LAUNCHED)


def finished_trials(rows: Iterable[RunRecord]) -> list[RunRecord]:
    """The trials that count against the budget, in the order in which they ran.

    Interrupted runs do not count, nor does the first loss of a node under each configuration.
    """
    finished = []
    chances: Counter[str] = Counter()
    for row in rows:
        if row.status in _NO_ANSWER:
            continue
        if row.status in _SECOND_CHANCE:
            key = canonical_key(row.config)
            chances[key] += 1
            if chances[key] == 1:
                continue
        finished.append(row)
    return finished


def deserves_second_chance(row: RunRecord, finished: Iterable[RunRecord]) -> bool:
    """Whether a run that just ended is to be tried once more."""
    return row.status in _SECOND_CHANCE and all(row.run_id != other.run_id for other in finished)


def trial_rows(store: Store, study: str) -> list[RunRecord]:
    """All trials of a study, oldest first."""
    return store.runs(study=study, kind=RunKind.TRIAL)


def histogram(rows: Iterable[RunRecord]) -> dict[str, int]:
    """Number of trials by status, in the order of the statuses."""
    counts = Counter(row.status for row in rows)
    return {status.value: counts[status] for status in Status if counts[status]}

"""Rows that a dead driver left behind as ``running``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from zerotune.records import Failure, RunKind, RunRecord, Status
from zerotune.records.run import now
from zerotune.runs.owner import is_alive
from zerotune.store.store import Store

# A driver on another host cannot be looked up. Its row is given up once it is older than any trial or benchmark gets; how long
# a launch takes is the user's business.
_FOREIGN_STALE = timedelta(hours=24)


_GHOST = Failure(status=Status.INTERRUPTED, message="its driver process ended without finishing it")


def is_orphan(record: RunRecord) -> bool:
    """Whether a ``running`` row has no driver any more."""
    alive = is_alive(record.owner)
    if alive is None:
        return record.kind is not RunKind.LAUNCH and datetime.now(UTC) - record.created > _FOREIGN_STALE
    return not alive


def reap(store: Store, study: str | None = None) -> list[RunRecord]:
    """Mark rows whose driver died as ``interrupted``.

    Args:
        store: The database.
        study: Only rows of this study; all rows if ``None``.

    Returns:
        The rows that were marked.
    """
    reaped = []
    for record in store.runs(study=study, status=Status.RUNNING):
        if is_orphan(record):
            ghost = record.model_copy(
                update={"status": Status.INTERRUPTED, "ended": now(), "failure": _GHOST}
            )
            store.update_run(ghost)
            reaped.append(ghost)
    return reaped


@contextmanager
def open_reaped(url: str, on_line: Callable[[str], None]) -> Iterator[Store]:
    """The store, without rows of drivers that are no more.

    Args:
        url: From :func:`zerotune.store.location.store_url`.
        on_line: Told a line about every row that was marked.
    """
    with Store.open(url) as store:
        for ghost in reap(store):
            of = "" if ghost.study is None else f", trial {ghost.trial_number} of {ghost.study},"
            on_line(f"run {ghost.run_id}{of} is interrupted: {_GHOST.message}")
        yield store

"""Rows that a dead driver left behind as ``running``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from zerotune.records import Failure, RunRecord, Status
from zerotune.records.run import now
from zerotune.runs.owner import is_alive
from zerotune.store.store import Store

# A driver on another host cannot be looked up. Its row is given up once it is older than any run of ours gets
# without an update.
_FOREIGN_STALE = timedelta(hours=24)


_GHOST = Failure(status=Status.INTERRUPTED, message="its driver process ended without finishing it")


def is_orphan(record: RunRecord) -> bool:
    """Whether a ``running`` row has no driver any more."""
    alive = is_alive(record.owner)
    if alive is None:
        return datetime.now(UTC) - record.created > _FOREIGN_STALE
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

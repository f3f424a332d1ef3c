"""Why a run did not end well."""

from __future__ import annotations

from zerotune.records.base import Record
from zerotune.records.status import Status


class Failure(Record):
    """The first cause of a failed run.

    Attributes:
        status: Kind of failure, never ``complete`` or ``running``.
        message: One line for the user.
        rank: The rank that failed first, if one did.
        node: Name of its node.
        phase: What it was doing: ``setup``, ``forward``, ``backward``, ``step``, ``save``, …
        traceback: That rank's traceback, for the log and ``zerotune show``.
        log_path: That rank's log file.
        remedy: What the user can do about it.
    """

    status: Status
    message: str
    rank: int | None = None
    node: str | None = None
    phase: str | None = None
    traceback: str | None = None
    log_path: str | None = None
    remedy: str | None = None

"""What a database says, as one line for the user."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, OperationalError

from zerotune.config.errors import UsageError


class NoStore(UsageError):
    """There is no store yet, which to a reader means: no results yet."""


def is_locked(error: DBAPIError) -> bool:
    """Whether somebody else holds the lock, so that waiting helps."""
    text = str(error.orig).lower()
    return isinstance(error, OperationalError) and ("database is locked" in text or "table is locked" in text)


def explain(error: DBAPIError, where: str) -> UsageError:
    """The error that a user reads instead of the driver's.

    Args:
        error: What SQLAlchemy raised.
        where: The store, as the user knows it: a path or a URL without its password.
    """
    reason = " ".join(str(error.orig).split())
    text = reason.lower()
    if is_locked(error):
        return UsageError(
            f"the store {where} is locked by another process", "end that process, or choose another --store"
        )
    if "not a database" in text or "malformed" in text:
        return UsageError(f"{where} is not a zerotune store: {reason}", "choose another file with --store")
    if "readonly" in text or "read-only" in text:
        return UsageError(f"the store {where} cannot be written: it is read-only", "choose another --store")
    if "disk is full" in text or "no space left" in text:
        return UsageError(f"the store {where} cannot be written: the disk is full", "free some space")
    if "unable to open database file" in text:
        return UsageError(
            f"the store {where} cannot be opened: its folder or file may not be written",
            "choose another --store",
        )
    return UsageError(f"the store {where} cannot be used: {reason}", "check --store or $ZEROTUNE_STORE")

"""The store, as the commands that only read it see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotune.cli.console import say

if TYPE_CHECKING:
    from zerotune.store.store import Store


def open_store(option: str | None) -> Store:
    """Open the store for reading.

    Raises:
        NoStore: There is none yet.
        UsageError: It cannot be used.
    """
    from zerotune.store.location import store_url
    from zerotune.store.store import Store

    return Store.open(store_url(option), create=False)


def note_unreadable(store: Store) -> None:
    """Say which rows were left out because another version wrote them."""
    if store.unreadable:
        ids = ", ".join(sorted(store.unreadable))
        say(f"note: left out, because this version of zerotune cannot read them: {ids}")

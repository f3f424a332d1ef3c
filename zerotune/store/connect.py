"""Engines for the databases that a store can be: an SQLite file, or a PostgreSQL server."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Engine, QueuePool, create_engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from zerotune.config.errors import UsageError
from zerotune.store.trouble import NoStore

_CONNECT_TIMEOUT_S = 10


def parse_url(text: str) -> URL:
    """Read the URL of a store.

    Raises:
        UsageError: Not a URL, of a database that is not supported, or of one in memory.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise UsageError(f"{text!r} is not a database URL", _EXAMPLES) from None
    backend = url.get_backend_name()
    if backend == "postgres":
        url = url.set(drivername=url.drivername.replace("postgres", "postgresql", 1))
    elif backend not in ("sqlite", "postgresql"):
        raise UsageError(f"a store cannot be in {backend!r} (from {url.render_as_string()!r})", _EXAMPLES)
    if url.get_backend_name() == "sqlite":
        if not url.database or url.database == ":memory:":
            raise UsageError("a store in memory would keep nothing", _EXAMPLES)
        url = URL.create("sqlite", database=str(Path(url.database).expanduser().absolute()))
    return url


_EXAMPLES = "give the path of a file, sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"


def sqlite_file(url: URL) -> Path | None:
    """The file of an SQLite store, ``None`` for a server."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def make_engine(url: URL, create: bool, lock_timeout_s: float) -> Engine:
    """An engine for a store. With ``create`` the folder of its file is made; the tables are the caller's matter.

    Args:
        url: From :func:`parse_url`.
        create: Whether to create and write. Without it a file that may not be written is read all the same.
        lock_timeout_s: How long one statement waits for another process's lock.

    Raises:
        NoStore: There is no file, and ``create`` is off.
        UsageError: The path is a folder, the folder cannot be made or written, or the driver is missing.
    """
    if (path := sqlite_file(url)) is not None:
        _check_file(path, create)
        creator = sqlite_creator(path, "rwc" if create else _read_mode(path), lock_timeout_s)
        return create_engine("sqlite://", creator=creator, poolclass=QueuePool)
    try:
        return create_engine(url, connect_args={"connect_timeout": _CONNECT_TIMEOUT_S}, pool_pre_ping=True)
    except NoSuchModuleError:
        raise UsageError(f"there is no database driver {url.drivername!r}", _EXAMPLES) from None
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the store {url.render_as_string()} needs the Python package {error.name}",
            "pip install 'psycopg[binary]'",
        ) from None


def sqlite_creator(
    path: Path, mode: str, lock_timeout_s: float, foreign_keys: bool = True
) -> Callable[[], sqlite3.Connection]:
    """A function that opens the file.

    Transactions begin with the first write and take the lock at once (``IMMEDIATE``). One that reads first and
    then wants to write cannot wait for another writer: SQLite fails it without asking the busy handler.
    """

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode={mode}",
            uri=True,
            timeout=lock_timeout_s,
            isolation_level="IMMEDIATE",
            check_same_thread=False,
        )
        connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    return connect


def optuna_engine_arguments(url: URL, lock_timeout_s: float) -> dict[str, Any]:
    """Arguments with which Optuna's engine waits for locks as ours does."""
    if (path := sqlite_file(url)) is not None:
        # Optuna deletes in an order of its own, so its connections go without foreign keys.
        creator = sqlite_creator(path, "rwc", lock_timeout_s, foreign_keys=False)
        return {"creator": creator, "poolclass": QueuePool}
    return {"connect_args": {"connect_timeout": _CONNECT_TIMEOUT_S}, "pool_pre_ping": True}


def _check_file(path: Path, create: bool) -> None:
    if path.is_dir():
        raise UsageError(f"the store {path} is a folder", f"give a file, for example {path / 'zerotune.db'}")
    try:
        exists = path.exists()
    except OSError as error:
        raise UsageError(
            f"the store {path} cannot be reached: {error.strerror}", "choose another --store"
        ) from None
    if not create:
        if not exists:
            raise NoStore(f"no results yet in {path}", "run zerotune search")
        if not os.access(path, os.R_OK):
            raise UsageError(
                f"the store {path} may not be read", "check its permissions, or choose another --store"
            )
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder {path.parent} of the store cannot be made: {error.strerror}",
            "choose another --store",
        ) from None
    # WAL writes two files beside the database, so the folder counts as much as the file.
    for place in (path.parent, path) if exists else (path.parent,):
        if not os.access(place, os.W_OK):
            raise UsageError(
                f"the store {path} cannot be written: {place} is read-only", "choose another --store"
            )


def _read_mode(path: Path) -> str:
    """How to open a file for reading only.

    A database in WAL mode is read through two files beside it, which a reader makes where they are missing. Where it
    may not, and nobody is writing nor has left anything in the log, the file is complete in itself: immutable.
    """
    log, index = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    in_use = log.exists() and (index.exists() or log.stat().st_size > 0)
    return "rw" if in_use or os.access(path.parent, os.W_OK) else "ro&immutable=1"

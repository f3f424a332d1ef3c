"""The store: every run is a row in one database, beside Optuna's own tables."""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable
from difflib import get_close_matches
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import URL, Connection, Engine, Select, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from zerotune.config.errors import UsageError
from zerotune.records import Ledger, RunKind, RunRecord, Status, StudyRecord
from zerotune.store.connect import make_engine, optuna_engine_arguments, parse_url, sqlite_file
from zerotune.store.tables import SCHEMA_VERSION, Base, LedgerRow, MetaRow, RunRow, StudyRow
from zerotune.store.trouble import NoStore, explain, is_locked

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

T = TypeVar("T")

LOCK_TIMEOUT_S = 60.0
_ATTEMPTS = 3
_LEDGERS = TypeAdapter(list[Ledger])
# Any number will do, as long as all who create the tables use the same one.
_POSTGRES_LOCK = 0x7A65726F


class Store:
    """An open store. Only the driver of a run writes; anybody may read at any time.

    A context manager; all methods raise :class:`~zerotune.config.errors.UsageError` with one line when the
    database cannot be used.

    Attributes:
        unreadable: Run ids of rows that this version of zerotune cannot read, as found so far.
    """

    def __init__(self, url: URL, engine: Engine, lock_timeout_s: float) -> None:
        self._url = url
        self._engine = engine
        self._lock_timeout_s = lock_timeout_s
        self.unreadable: set[str] = set()

    # ------------------------------------------------------------------------------------- opening and closing

    @classmethod
    def open(cls, url: str, create: bool = True, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Store:
        """Open a store.

        Args:
            url: From :func:`zerotune.store.location.store_url`.
            create: Whether to create what is not there yet, and to write. Readers say no.
            lock_timeout_s: How long a write waits for another process's lock before it is tried again.

        Raises:
            NoStore: There is nothing yet, and ``create`` is off.
            UsageError: It cannot be read, or cannot be written although ``create`` is on; it is not a database;
                a newer version of zerotune wrote it; the server is unreachable; the URL is not supported.
        """
        parsed = parse_url(url)
        store = cls(parsed, make_engine(parsed, create, lock_timeout_s), lock_timeout_s)
        try:
            store._attempt(store._prepare if create else store._check_readable)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def where(self) -> str:
        """The store as a user knows it: its file, or its URL without the password."""
        path = sqlite_file(self._url)
        return str(path) if path is not None else self._url.render_as_string(hide_password=True)

    # ------------------------------------------------------------------------------------------------------ runs

    def add_run(self, run: RunRecord) -> None:
        """Add a run.

        Raises:
            ValueError: Its id is taken.
        """
        self._insert(RunRow, RunRow.values(run), f"run {run.run_id}")

    def update_run(self, run: RunRecord) -> None:
        """Replace a run by a newer record of itself.

        Raises:
            LookupError: There is no run of this id.
        """
        self._replace(RunRow, run.run_id, RunRow.values(run))

    def get_run(self, run_id: str) -> RunRecord:
        """The run of this id, or the only one whose id begins so.

        Raises:
            UsageError: There is none, or more than one.
        """
        row = self._read(lambda session: session.get(RunRow, run_id))
        if row is not None:
            return self._parse_or_refuse(row)
        query = select(RunRow.run_id).order_by(RunRow.created.desc(), RunRow.run_id)
        found = (
            self._scalars(query.where(RunRow.run_id.startswith(run_id, autoescape=True))) if run_id else []
        )
        if len(found) == 1:
            return self.get_run(found[0])
        if found:
            raise UsageError(
                f"{run_id!r} is the beginning of several runs: {_some(found)}", "give more of it"
            )
        known = self._scalars(query)
        if not known:
            raise UsageError(
                f"no run {run_id!r}: there are no results yet in {self.where}", "run zerotune search"
            )
        near = get_close_matches(run_id, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the latest are {_some(known)}"
        raise UsageError(f"no run {run_id!r} in {self.where}", f"{hint}; zerotune results lists them")

    def runs(
        self,
        study: str | None = None,
        workload_key: str | None = None,
        cluster_key: str | None = None,
        kind: RunKind | None = None,
        status: Status | None = None,
    ) -> list[RunRecord]:
        """The runs for which all that is given holds, oldest first.

        Rows that this version cannot read are left out; their ids are in :attr:`unreadable`.
        """
        wanted = {
            RunRow.study: study,
            RunRow.workload_key: workload_key,
            RunRow.cluster_key: cluster_key,
            RunRow.kind: kind.value if kind else None,
            RunRow.status: status.value if status else None,
        }
        query = select(RunRow).order_by(RunRow.created, RunRow.trial_number, RunRow.run_id)
        for column, value in wanted.items():
            if value is not None:
                query = query.where(column == value)
        parsed = [self._parse(row) for row in self._scalars(query)]
        return [run for run in parsed if run is not None]

    # --------------------------------------------------------------------------------------------------- studies

    def add_study(self, study: StudyRecord) -> None:
        """Add a study.

        Raises:
            ValueError: Its name is taken.
        """
        self._insert(StudyRow, StudyRow.values(study), f"study {study.name}")

    def update_study(self, study: StudyRecord) -> None:
        """Replace a study by a newer record of itself.

        Raises:
            LookupError: There is no study of this name.
        """
        self._replace(StudyRow, study.name, StudyRow.values(study))

    def find_study(self, name: str) -> StudyRecord | None:
        """The study of this name, if there is one."""
        row = self._read(lambda session: session.get(StudyRow, name))
        return None if row is None else StudyRecord.model_validate(json.loads(row.record))

    def get_study(self, name: str) -> StudyRecord:
        """The study of this name.

        Raises:
            UsageError: There is none.
        """
        study = self.find_study(name)
        if study is not None:
            return study
        known = self._scalars(select(StudyRow.name).order_by(StudyRow.created.desc()))
        near = get_close_matches(name, known, n=1)
        if near:
            hint = f"did you mean {near[0]}?"
        else:
            hint = f"there are {_some(known)}" if known else "there are none yet, run zerotune search"
        raise UsageError(f"no study {name!r} in {self.where}", hint)

    def studies(self, workload_key: str | None = None, cluster_key: str | None = None) -> list[StudyRecord]:
        """The studies for which all that is given holds, oldest first."""
        query = select(StudyRow).order_by(StudyRow.created, StudyRow.name)
        if workload_key is not None:
            query = query.where(StudyRow.workload_key == workload_key)
        if cluster_key is not None:
            query = query.where(StudyRow.cluster_key == cluster_key)
        return [StudyRecord.model_validate(json.loads(row.record)) for row in self._scalars(query)]

    # --------------------------------------------------------------------------------------------------- ledgers

    def save_ledgers(self, run_id: str, ledgers: list[Ledger]) -> None:
        """Keep the ledgers of one steady step of a run, in place of any kept before.

        Raises:
            LookupError: There is no run of this id.
        """
        data = zlib.compress(_LEDGERS.dump_json(ledgers), level=6)

        def write(session: Session) -> None:
            if session.get(RunRow, run_id) is None:
                raise LookupError(f"no run {run_id}")
            session.merge(LedgerRow(run_id=run_id, data=data))

        self._write(write)

    def ledgers(self, run_id: str) -> list[Ledger]:
        """The ledgers of a run, one per rank; empty if none were kept."""
        row = self._read(lambda session: session.get(LedgerRow, run_id))
        return [] if row is None else _LEDGERS.validate_json(zlib.decompress(row.data))

    # ---------------------------------------------------------------------------------------------------- Optuna

    @property
    def optuna_storage_url(self) -> str:
        """The URL under which Optuna finds its tables in this database, password included."""
        return self._url.render_as_string(hide_password=False)

    def open_optuna_storage(self) -> RDBStorage:
        """Optuna's storage in this database, waiting for locks as this store does.

        Raises:
            UsageError: Its tables cannot be made, or another version of Optuna made them.
        """
        # Alembic reports every start at INFO, which is nobody's concern.
        logging.getLogger("alembic").setLevel(logging.WARNING)
        import optuna
        from optuna.storages import RDBStorage

        optuna.logging.set_verbosity(optuna.logging.WARNING)

        def make() -> RDBStorage:
            arguments = optuna_engine_arguments(self._url, self._lock_timeout_s)
            return RDBStorage(self.optuna_storage_url, engine_kwargs=arguments)

        for attempt in range(_ATTEMPTS):
            try:
                return self._attempt(make)
            except optuna.exceptions.StorageInternalError as error:
                raise UsageError(f"Optuna cannot use the store {self.where}: {error}") from error
            except RuntimeError as error:
                raise UsageError(
                    f"the store {self.where} was made by another version of Optuna: {error}"
                ) from error
            except UsageError:
                # Optuna does not guard the making of its tables: whoever comes second fails, and then finds them.
                if attempt + 1 == _ATTEMPTS:
                    raise
                time.sleep(0.2 * (attempt + 1))
        raise AssertionError("unreachable")

    # --------------------------------------------------------------------------------------------------- privates

    def _prepare(self) -> None:
        """Create the tables where they are missing, and check the version."""
        with self._engine.connect() as connection:
            if self._engine.dialect.name == "sqlite":
                _use_wal(connection)
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_POSTGRES_LOCK})"))
            Base.metadata.create_all(connection)
            version = connection.scalar(select(MetaRow.value).where(MetaRow.name == "schema_version"))
            if version is None:
                connection.execute(insert(MetaRow).values(name="schema_version", value=str(SCHEMA_VERSION)))
            else:
                self._check_version(version)
            connection.commit()

    def _check_readable(self) -> None:
        with self._engine.connect() as connection:
            if not inspect(connection).has_table(MetaRow.__tablename__):
                raise NoStore(f"no results yet in {self.where}", "run zerotune search")
            version = connection.scalar(select(MetaRow.value).where(MetaRow.name == "schema_version"))
        self._check_version(version or "0")

    def _check_version(self, version: str) -> None:
        if int(version) > SCHEMA_VERSION:
            raise UsageError(
                f"the store {self.where} was written by a newer zerotune (its format is {version}, this one reads up"
                f" to {SCHEMA_VERSION})",
                "upgrade zerotune, or choose another --store",
            )

    def _attempt(self, action: Callable[[], T]) -> T:
        """Do it; while somebody else holds the lock, do it again; in the end say so in one line."""
        for attempt in range(_ATTEMPTS):
            try:
                return action()
            except DBAPIError as error:
                if is_locked(error) and attempt + 1 < _ATTEMPTS:
                    time.sleep(0.05 * 2**attempt)
                    continue
                raise explain(error, self.where) from error
        raise AssertionError("unreachable")

    def _read(self, action: Callable[[Session], T]) -> T:
        def transaction() -> T:
            with Session(self._engine) as session:
                return action(session)

        return self._attempt(transaction)

    def _write(self, action: Callable[[Session], None]) -> None:
        def transaction() -> None:
            with Session(self._engine) as session, session.begin():
                action(session)

        self._attempt(transaction)

    def _scalars(self, query: Select[T]) -> list[T]:
        return self._read(lambda session: list(session.scalars(query)))

    def _insert(self, table: type[RunRow] | type[StudyRow], values: dict[str, Any], what: str) -> None:
        try:
            self._write(lambda session: session.add(table(**values)))
        except UsageError as error:
            if isinstance(error.__cause__, IntegrityError):
                raise ValueError(f"{what} is in the store already") from error
            raise

    def _replace(self, table: type[RunRow] | type[StudyRow], key: str, values: dict[str, Any]) -> None:
        def write(session: Session) -> None:
            row = session.get(table, key)
            if row is None:
                raise LookupError(f"{key} is not in the store")
            for name, value in values.items():
                setattr(row, name, value)

        self._write(write)

    def _parse(self, row: RunRow) -> RunRecord | None:
        try:
            return RunRecord.model_validate(json.loads(row.record))
        except ValidationError:
            self.unreadable.add(row.run_id)
            return None

    def _parse_or_refuse(self, row: RunRow) -> RunRecord:
        run = self._parse(row)
        if run is None:
            raise UsageError(
                f"run {row.run_id} was recorded by a version of zerotune that this one cannot read"
            )
        return run


def _use_wal(connection: Connection) -> None:
    # Asked first: switching needs everybody else out, being switched needs nothing. Network file systems that
    # cannot have it keep their old mode, which is slower and just as safe.
    if connection.exec_driver_sql("PRAGMA journal_mode").scalar() != "wal":
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

"""Several processes at one store: nothing is lost, nobody crashes, and readers never wait (scenario S06)."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import make_run
from zerotune.config.errors import UsageError
from zerotune.records import Status
from zerotune.store.store import Store

# fork: a child needs no import of its own, and may drop its privileges.
PROCESSES = multiprocessing.get_context("fork")
NOBODY = 65534
CLOSED = "closed"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "zerotune.db"


def start(target: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    process = PROCESSES.Process(target=target, args=arguments)
    process.start()
    return process


def _write_50(path: Path, writer: int) -> None:
    # Opening is part of it: all of them create the tables at once, Optuna's too.
    with Store.open(f"sqlite:///{path}") as store:
        storage = store.open_optuna_storage()
        for number in range(50):
            run = make_run(f"t-{writer}-{number}", None, status=Status.RUNNING)
            store.add_run(run)
            store.update_run(make_run(f"t-{writer}-{number}", 1000.0 + number))
        storage.remove_session()


def test_eight_writers_lose_nothing(path):
    writers = [start(_write_50, path, writer) for writer in range(8)]
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            try:
                with Store.open(f"sqlite:///{path}", create=False) as reader:
                    reader.runs()
            except UsageError as error:
                assert "no results yet" in str(error)
        time.sleep(0.1)
    assert [writer.exitcode for writer in writers] == [0] * 8
    with Store.open(f"sqlite:///{path}", create=False) as store:
        assert len(store.runs(status=Status.COMPLETE)) == 400


def test_a_write_waits_for_a_lock_and_a_reader_does_not(path):
    Store.open(f"sqlite:///{path}").close()
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    holder.execute("UPDATE zerotune_meta SET value = value")
    threading.Timer(2.0, lambda: holder.execute("COMMIT")).start()
    started = time.monotonic()
    with Store.open(f"sqlite:///{path}", create=False) as reader:
        assert reader.runs() == []
    assert time.monotonic() - started < 1.0
    with Store.open(f"sqlite:///{path}") as store:
        store.add_run(make_run())
        assert time.monotonic() - started > 1.5
        assert len(store.runs()) == 1
    holder.close()


def test_optuna_waits_too(path):
    with Store.open(f"sqlite:///{path}") as store:
        import optuna

        study = optuna.create_study(storage=store.open_optuna_storage())
        trial = study.ask()
        holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        holder.execute("BEGIN IMMEDIATE")
        threading.Timer(1.0, lambda: holder.execute("COMMIT")).start()
        study.tell(trial, 1.0)
        assert len(study.trials) == 1
        holder.close()


def _as_nobody(
    action: Callable[[], str], folder: Path, answers: multiprocessing.queues.SimpleQueue[str]
) -> None:
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    answers.put(action() if os.access(folder, os.X_OK) else CLOSED)


def as_ordinary_user(action: Callable[[], str], folder: Path) -> str:
    """Run it in a process for which permissions count, which they do not for root."""
    answers = PROCESSES.SimpleQueue()
    start(_as_nobody, action, folder, answers).join(30)
    assert not answers.empty()
    answer = answers.get()
    if answer == CLOSED:
        pytest.skip("the temporary folder is closed to other users")
    return answer


def outcome(path: Path, create: bool) -> Callable[[], str]:
    def action() -> str:
        try:
            with Store.open(f"sqlite:///{path}", create=create) as store:
                return f"{len(store.runs())} runs"
        except UsageError as error:
            return str(error)

    return action


class TestPermissions:
    @pytest.fixture
    def folder(self, tmp_path):
        # pytest's folders are closed to others
        for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
            parent.chmod(0o755)
        folder = tmp_path / "store"
        folder.mkdir()
        yield folder
        folder.chmod(0o755)

    def test_a_folder_that_may_not_be_written(self, folder, tmp_path):
        folder.chmod(0o555)
        line = as_ordinary_user(outcome(folder / "zerotune.db", create=True), tmp_path)
        assert f"cannot be written: {folder} is read-only" in line
        line = as_ordinary_user(outcome(folder / "deeper" / "zerotune.db", create=True), tmp_path)
        assert f"the folder {folder / 'deeper'} of the store cannot be made" in line
        assert list(folder.iterdir()) == []

    def test_a_store_that_may_be_read_only(self, folder, tmp_path):
        path = folder / "zerotune.db"
        with Store.open(f"sqlite:///{path}") as store:
            store.add_run(make_run())
        path.chmod(0o444)
        folder.chmod(0o555)
        assert as_ordinary_user(outcome(path, create=False), tmp_path) == "1 runs"
        assert "is read-only" in as_ordinary_user(outcome(path, create=True), tmp_path)

    def test_another_user_s_store_while_it_is_written(self, folder, tmp_path):
        path = folder / "zerotune.db"
        with Store.open(f"sqlite:///{path}") as store:
            store.add_run(make_run("t-1"))
            folder.chmod(0o555)
            assert as_ordinary_user(outcome(path, create=False), tmp_path) == "1 runs"
            store.add_run(make_run("t-2"))
            assert as_ordinary_user(outcome(path, create=False), tmp_path) == "2 runs"

    def test_a_store_that_may_not_be_read(self, folder, tmp_path):
        path = folder / "zerotune.db"
        Store.open(f"sqlite:///{path}").close()
        path.chmod(0o000)
        assert "may not be read" in as_ordinary_user(outcome(path, create=False), tmp_path)

"""The same store on a PostgreSQL server, where the packages for one are installed."""

from __future__ import annotations

import threading

import pytest

from tests.builders import make_ledger, make_run, make_study
from zerotune.config.errors import UsageError
from zerotune.records import Status
from zerotune.store.store import Store

pytest.importorskip("psycopg")


def test_an_unreachable_server_is_one_line():
    with pytest.raises(UsageError, match="cannot be used") as caught:
        Store.open("postgresql://somebody:secret@127.0.0.1:1/zerotune")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    pgserver = pytest.importorskip("pgserver")
    server = pgserver.get_server(tmp_path_factory.mktemp("postgres"))
    yield server.get_uri()
    server.cleanup()


def test_what_goes_in_comes_out(url):
    with pytest.raises(UsageError, match="no results yet"):
        Store.open(url, create=False)
    with Store.open(url) as store:
        store.add_study(make_study())
        store.add_run(make_run("t-1", None, status=Status.RUNNING))
        store.update_run(make_run("t-1", peak_memory_bytes=2**40))
        store.save_ledgers("t-1", [make_ledger()])
    with Store.open(url, create=False) as store:
        assert store.runs() == [make_run("t-1", peak_memory_bytes=2**40)]
        assert store.get_run("t-") == store.runs()[0]
        assert store.ledgers("t-1") == [make_ledger()]
        assert store.studies() == [make_study()]
        with pytest.raises(ValueError, match="already"):
            store.add_run(make_run("t-1"))


def test_optuna_lives_there_too(url):
    import optuna

    with Store.open(url) as store:
        study = optuna.create_study(storage=store.open_optuna_storage(), study_name="demo")
        study.tell(study.ask(), 1.0)
        assert len(study.trials) == 1


def test_several_writers(url):
    def write(writer: int) -> None:
        with Store.open(url) as store:
            for number in range(20):
                store.add_run(make_run(f"t-{writer}-{number}"))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Store.open(url, create=False) as store:
        assert len([run for run in store.runs() if run.run_id.count("-") == 2]) == 80

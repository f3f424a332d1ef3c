"""The store on real SQLite files: what goes in comes out, and every unusable store is one line."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest

from tests.builders import (
    make_cluster,
    make_ledger,
    make_measurement,
    make_run,
    make_study,
    make_workload,
)
from zerotune.config.errors import UsageError
from zerotune.records import RunKind, Status
from zerotune.store.ids import new_run_id
from zerotune.store.store import Store
from zerotune.store.trouble import NoStore


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/deep/zerotune.db"


@pytest.fixture
def store(url: str):
    with Store.open(url) as store:
        yield store


class TestRuns:
    def test_what_goes_in_comes_out(self, store, url):
        run = make_run("t-12345678", number=3)
        store.add_run(run)
        assert store.get_run("t-12345678") == run
        with Store.open(url, create=False) as reader:
            assert reader.runs() == [run]

    def test_a_loss_that_is_no_number_survives(self, store):
        store.add_run(make_run().model_copy(update={"measurement": make_measurement(final_loss=math.nan)}))
        assert math.isnan(store.get_run("t-00000000").measurement.final_loss)

    def test_update(self, store):
        running = make_run("t-1", None, status=Status.RUNNING)
        store.add_run(running)
        done = make_run("t-1", 1234.0)
        store.update_run(done)
        assert store.runs() == [done]
        assert store.runs(status=Status.RUNNING) == []
        assert store.runs(status=Status.COMPLETE) == [done]

    def test_an_id_is_taken_once_and_updates_need_it(self, store):
        store.add_run(make_run("t-1"))
        with pytest.raises(ValueError, match="run t-1 is in the store already"):
            store.add_run(make_run("t-1"))
        with pytest.raises(LookupError, match="t-2"):
            store.update_run(make_run("t-2"))

    def test_filters(self, store):
        runs = {
            "plain": make_run("t-1", number=1),
            "study": make_run("t-2", number=2, study="other"),
            "workload": make_run("t-3", number=3, workload=make_workload("llama")),
            "cluster": make_run("t-4", number=4, cluster=make_cluster(nodes=2)),
            "kind": make_run("l-5", number=5, kind=RunKind.LAUNCH),
        }
        for run in runs.values():
            store.add_run(run)
        assert store.runs() == list(runs.values())
        assert store.runs(study="other") == [runs["study"]]
        assert store.runs(workload_key=make_workload("llama").key) == [runs["workload"]]
        assert store.runs(cluster_key=make_cluster(nodes=2).key) == [runs["cluster"]]
        assert store.runs(kind=RunKind.LAUNCH, study="demo") == [runs["kind"]]
        assert store.runs(kind=RunKind.LAUNCH, study="other") == []

    def test_the_beginning_of_an_id_is_enough(self, store):
        for run_id in ("t-aa01", "t-aa02", "t-bb01", "l_a"):
            store.add_run(make_run(run_id))
        assert store.get_run("t-b").run_id == "t-bb01"
        with pytest.raises(UsageError, match="several runs: t-aa01, t-aa02"):
            store.get_run("t-aa")
        with pytest.raises(UsageError, match=r"no run 't-bb02' .*did you mean t-bb01"):
            store.get_run("t-bb02")
        # LIKE's wildcards are letters like any other
        for pattern in ("t%", "l-a", ""):
            with pytest.raises(UsageError, match="no run"):
                store.get_run(pattern)

    def test_a_row_of_another_version_hides_no_other(self, store, url):
        store.add_run(make_run("t-1"))
        store.add_run(make_run("t-2"))
        with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
            raw.execute("UPDATE zt_runs SET record = '{\"run_id\": \"t-1\"}' WHERE run_id = 't-1'")
        assert [run.run_id for run in store.runs()] == ["t-2"]
        assert store.unreadable == {"t-1"}
        with pytest.raises(UsageError, match="t-1 was recorded by a version"):
            store.get_run("t-1")

    def test_new_ids(self):
        ids = {new_run_id(kind) for kind in RunKind for _ in range(100)}
        assert len(ids) == 100 * len(RunKind)
        assert all(len(run_id) == 10 for run_id in ids)


class TestStudies:
    def test_what_goes_in_comes_out(self, store):
        study = make_study()
        store.add_study(study)
        assert store.get_study("demo") == study
        better = study.model_copy(update={"best": "t-1", "wall_seconds": 12.0})
        store.update_study(better)
        assert store.studies() == [better]
        assert store.studies(workload_key=make_workload("other").key) == []
        assert store.studies(cluster_key=make_cluster().key) == [better]
        with pytest.raises(ValueError, match="study demo is in the store already"):
            store.add_study(study)
        with pytest.raises(LookupError):
            store.update_study(make_study("other"))

    def test_an_unknown_name(self, store):
        with pytest.raises(UsageError, match="there are none yet"):
            store.get_study("gpt")
        store.add_study(make_study("gpt-small"))
        assert store.find_study("gpt-smal") is None
        with pytest.raises(UsageError, match="did you mean gpt-small"):
            store.get_study("gpt-smal")
        with pytest.raises(UsageError, match="there are gpt-small"):
            store.get_study("zzz")


class TestLedgers:
    def test_what_goes_in_comes_out(self, store):
        store.add_run(make_run("t-1"))
        assert store.ledgers("t-1") == []
        store.save_ledgers("t-1", [make_ledger(0), make_ledger(1)])
        assert store.ledgers("t-1") == [make_ledger(0), make_ledger(1)]
        store.save_ledgers("t-1", [make_ledger(2)])
        assert store.ledgers("t-1") == [make_ledger(2)]

    def test_a_ledger_belongs_to_a_run(self, store):
        with pytest.raises(LookupError, match="no run t-1"):
            store.save_ledgers("t-1", [])


class TestOptuna:
    def test_lives_in_the_same_file(self, store, url):
        import optuna

        storage = store.open_optuna_storage()
        study = optuna.create_study(storage=storage, study_name="demo")
        study.tell(study.ask({"x": optuna.distributions.FloatDistribution(0, 1)}), 1.0)
        store.add_run(make_run("t-1"))
        with Store.open(url) as again:
            assert len(optuna.load_study(storage=again.open_optuna_storage(), study_name="demo").trials) == 1
            assert [run.run_id for run in again.runs()] == ["t-1"]
        assert store.optuna_storage_url == url


class TestUnusable:
    """Each is a UsageError of one line, whose exit code is 2."""

    def refuses(self, url: str, match: str, create: bool = True) -> UsageError:
        with pytest.raises(UsageError, match=match) as caught:
            Store.open(url, create=create, lock_timeout_s=0.05)
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)
        return caught.value

    def test_absent(self, url):
        error = self.refuses(url, "no results yet", create=False)
        assert isinstance(error, NoStore)
        assert "zerotune search" in str(error)
        assert not Path(url.removeprefix("sqlite:///")).parent.exists()

    def test_somebody_else_s_database_has_no_results(self, tmp_path):
        with sqlite3.connect(tmp_path / "other.db") as other:
            other.execute("CREATE TABLE runs (x)")
        assert isinstance(self.refuses(f"sqlite:///{tmp_path}/other.db", "no results", create=False), NoStore)
        (tmp_path / "empty.db").touch()
        assert isinstance(self.refuses(f"sqlite:///{tmp_path}/empty.db", "no results", create=False), NoStore)

    @pytest.mark.parametrize("create", [True, False])
    def test_garbage(self, tmp_path, create):
        garbage = tmp_path / "garbage.db"
        garbage.write_bytes(b"this is not a database" * 100)
        self.refuses(f"sqlite:///{garbage}", "is not a zerotune store", create)
        assert garbage.read_bytes() == b"this is not a database" * 100

    @pytest.mark.parametrize("create", [True, False])
    def test_a_folder(self, tmp_path, create):
        self.refuses(f"sqlite:///{tmp_path}", "is a folder .*zerotune.db", create)

    def test_a_file_as_the_folder(self, tmp_path):
        (tmp_path / "file").touch()
        self.refuses(f"sqlite:///{tmp_path}/file/zerotune.db", "cannot be made")

    @pytest.mark.parametrize("create", [True, False])
    def test_a_newer_version(self, url, create):
        Store.open(url).close()
        with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
            raw.execute("UPDATE zerotune_meta SET value = '99' WHERE name = 'schema_version'")
        self.refuses(url, "written by a newer zerotune .*upgrade", create)

    @pytest.mark.parametrize(
        ("url", "match"),
        [
            ("mysql://host/db", "cannot be in 'mysql'"),
            ("s3://bucket/zerotune.db", "cannot be in 's3'"),
            ("sqlite://", "in memory"),
            ("sqlite:///:memory:", "in memory"),
            ("nonsense", "is not a database URL"),
            ("postgresql+nosuch://host/db", "no database driver"),
        ],
    )
    def test_urls(self, url, match):
        self.refuses(url, match)

    def test_locked_for_too_long(self, url):
        Store.open(url).close()
        holder = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with Store.open(url, create=False, lock_timeout_s=0.05) as store:
            assert store.runs() == []
            with pytest.raises(UsageError, match="locked by another process"):
                store.add_run(make_run())
        self.refuses(url, "locked by another process")
        holder.close()

    def test_disk_full(self, store):
        # A file that may not grow stands for a disk that has no room.
        creator = store._engine.pool._creator
        store._engine.dispose()

        def small():
            connection = creator()
            connection.execute("PRAGMA max_page_count=10")
            return connection

        store._engine.pool._creator = small
        with pytest.raises(UsageError, match="disk is full"):
            for number in range(100):
                store.add_run(make_run(f"t-{number}"))

"""Where the store is."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotune.config.errors import UsageError
from zerotune.store.location import store_url


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ZEROTUNE_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_the_option_goes_first(empty_folder, monkeypatch):
    monkeypatch.setenv("ZEROTUNE_STORE", "/elsewhere.db")
    assert store_url("runs.db") == f"sqlite:///{empty_folder}/runs.db"
    assert store_url("/a/b.db") == "sqlite:////a/b.db"
    assert store_url("postgresql://u:p@host/db") == "postgresql://u:p@host/db"


def test_then_the_environment(empty_folder, monkeypatch):
    (empty_folder / "model.yaml").touch()
    monkeypatch.setenv("ZEROTUNE_STORE", "/elsewhere.db")
    assert store_url() == "sqlite:////elsewhere.db"


@pytest.mark.parametrize("mark", ["model.yaml", "results"])
def test_then_the_project(empty_folder, mark):
    place = empty_folder / mark
    place.touch() if place.suffix else place.mkdir()
    assert store_url() == f"sqlite:///{empty_folder}/results/runs/zerotune.db"
    assert sorted(path.name for path in empty_folder.rglob("*")) == [mark]


def test_then_the_user_s_data(tmp_path):
    url = store_url()
    assert url.endswith("zerotune/zerotune.db")
    assert "here" not in url


def test_an_empty_option_is_a_mistake(monkeypatch):
    with pytest.raises(UsageError, match="--store is empty"):
        store_url(" ")
    monkeypatch.setenv("ZEROTUNE_STORE", "")
    with pytest.raises(UsageError, match="ZEROTUNE_STORE is empty"):
        store_url()

"""``zerotune init``."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotune.cli.main import run
from zerotune.config.load import load_job
from zerotune.config.template import MODEL_YAML

ROOT = Path(__file__).parents[2]


def test_writes_a_file_that_loads_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init"]) == 0
    assert capsys.readouterr().out == "wrote model.yaml; next: zerotune search model.yaml\n"
    loaded = load_job("model.yaml")
    assert loaded.warnings == []
    job = loaded.job
    assert job.model.gpt is not None and (job.model.gpt.layers, job.model.gpt.d_model) == (4, 256)
    assert (job.train.global_batch_size, job.train.micro_batch_size, job.cluster.procs_per_node) == (8, 2, 2)
    assert job.data.text is not None and job.data.text.paths == ["stdlib"]


def test_every_line_is_explained_or_plain() -> None:
    assert MODEL_YAML.isascii()
    assert max(map(len, MODEL_YAML.splitlines())) <= 120
    assert len(MODEL_YAML.splitlines()) < 50


def test_the_example_is_what_init_writes() -> None:
    assert (ROOT / "examples" / "model.yaml").read_text(encoding="utf-8") == MODEL_YAML


def test_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    assert run(["init", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"error: {file} is there already (give --force to overwrite it, or another path)\n"
    )
    assert file.read_text() == "mine"
    assert run(["init", str(file), "--force"]) == 0
    assert file.read_text() == MODEL_YAML


def test_into_a_folder(tmp_path: Path) -> None:
    assert run(["init", str(tmp_path)]) == 0
    assert (tmp_path / "model.yaml").read_text() == MODEL_YAML


def test_no_such_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", str(tmp_path / "a" / "b.yaml")]) == 2
    assert "there is no folder" in capsys.readouterr().err

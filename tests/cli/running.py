"""The commands that run things, in a folder of their own, on workers that only compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.search.fakes import FakeWorkers
from zerotune.cli.main import run
from zerotune.config.schema import JobConfig
from zerotune.runs.cluster_key import cluster_fingerprint
from zerotune.runs.execute import Executor
from zerotune.runs.folders import runs_root
from zerotune.runs.session import Placement, Session
from zerotune.store.store import Store

MODEL = """
model:
  gpt: {layers: 2, d_model: 64, heads: 2, sequence_length: 32}
train: {steps: 5, global_batch_size: 8}
search: {space: space.yaml, trials: 4, confirm_rounds: 2}
"""

SPACE = """
knobs:
  prefetch_distance: {relative_to: block, values: [0, 1, 2, 4]}
  release: [after_use, keep]
"""


@dataclass
class Folder:
    """A project folder in which commands run.

    Attributes:
        path: Where.
        workers: What stands for the ranks.
    """

    path: Path
    workers: FakeWorkers
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """Run a command; exit code, stdout and stderr."""
        self.capsys.readouterr()
        code = run(args)
        out, err = self.capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    def json(self, *args: str) -> Any:
        code, out, err = self(*args, "--json")
        assert code == 0, err
        return json.loads(out)

    @property
    def store(self) -> Store:
        return Store.open(f"sqlite:///{self.path / 'results' / 'runs' / 'zerotune.db'}")


def make_folder(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    surface: Callable[[JobConfig], Any],
) -> Folder:
    """A folder with a model.yaml and a small space, whose ranks are fake."""
    workers = FakeWorkers(surface)

    @contextmanager
    def session(
        job: JobConfig, placement: Placement, store_url: str, on_line: Callable[[str], None]
    ) -> Iterator[Session]:
        nodes, procs = placement.expected_shape(job, 0)
        cluster = cluster_fingerprint("test cpu", procs, nodes, job.cluster.link)
        with Store.open(store_url) as store:
            executor = Executor(store, workers, cluster, runs_root(store_url))
            try:
                yield Session(store, None, cluster, nodes * procs, executor)  # type: ignore[arg-type]
            finally:
                executor.close()

    monkeypatch.setattr("zerotune.runs.session.session", session)
    monkeypatch.setattr("zerotune.runs.cluster_key.device_model", lambda gpu: "test cpu")
    monkeypatch.delenv("ZEROTUNE_STORE", raising=False)
    monkeypatch.chdir(path)
    (path / "model.yaml").write_text(MODEL)
    (path / "space.yaml").write_text(SPACE)
    return Folder(path, workers, capsys)

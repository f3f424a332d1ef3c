"""The real thing, once: Ray, ranks, training, the store; interrupted, gone on with, and launched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from zerotune.config.errors import ExitCode
from zerotune.config.load import load_job
from zerotune.records import RunKind, Status
from zerotune.store.location import file_url
from zerotune.store.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

MODEL = """
model:
  gpt: {layers: 2, d_model: 32, heads: 2, sequence_length: 16}
data: {synthetic: {}}
train: {global_batch_size: 8}
cluster: {procs_per_node: 2}
search: {space: quick, trials: 2, confirm_rounds: 2, max_steps: 10, warmup_steps: 2}
"""


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "zerotune", *args]


def environment() -> dict[str, str]:
    checkout = str(Path(__file__).parents[2])
    kept = {
        name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "ZEROTUNE_STORE")
    }
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))}


def run(folder: Path, *args: str) -> tuple[int, str, str]:
    done = subprocess.run(command(*args), cwd=folder, env=environment(), capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def run_json(folder: Path, *args: str) -> Any:
    code, out, err = run(folder, *args, "--json")
    assert code == 0, err
    return json.loads(out)


def test_search_interrupted_and_gone_on_with_then_launch(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL)
    search = subprocess.Popen(
        command("search"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert search.stderr is not None
    lines = []
    for line in search.stderr:
        lines.append(line)
        if line.startswith("[1/2]"):
            break
    ours = psutil.Process(search.pid).children(recursive=True)
    assert ours, lines
    search.send_signal(signal.SIGINT)
    interrupted = time.monotonic()
    _, rest = search.communicate(timeout=60)
    assert search.returncode == ExitCode.INTERRUPTED, lines
    assert rest.strip().splitlines()[-1].startswith("interrupted: ")
    _, alive = psutil.wait_procs(ours, timeout=max(0.1, interrupted + 15 - time.monotonic()))
    assert not alive

    url = file_url(tmp_path / "results" / "runs" / "zerotune.db")
    with Store.open(url) as store:
        (first,) = [row for row in store.runs() if row.status is Status.COMPLETE]
        assert not store.runs(status=Status.RUNNING)

    found = run_json(tmp_path, "search")
    assert found["trials"] == {"complete": 2}
    assert found["baseline"]["run_id"] == first.run_id, "the finished trial is kept"
    assert found["speedup_ci"][0] <= found["speedup"] <= found["speedup_ci"][1]
    with Store.open(url) as store:
        trials = [row for row in store.runs(kind=RunKind.TRIAL) if row.status is Status.COMPLETE]
        assert len({row.config.zero.model_dump_json() for row in trials}) == 2
        for row in trials:
            assert row.measurement is not None and len(row.measurement.step_times_s) >= 10
            assert len(store.ledgers(row.run_id)) == 2
        best = store.get_run(found["best"]["run_id"])
    assert load_job(tmp_path / "best.yaml").job == best.config

    launched = run_json(tmp_path, "launch", "--steps", "2", "--set", "train.save_every=2")
    assert launched["status"] == "complete" and launched["steps"] == 2
    assert launched["config"]["zero"] == found["best"]["config"]["zero"]
    assert Path(launched["checkpoint"]).is_dir()

    code, _, err = run(tmp_path, "launch", "--nodes", "2")
    assert code == ExitCode.RESOURCES and "ray start --head" in err

"""The real thing, by the command line alone: Ray, ranks, training, the store; on one node, on two, and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero.settings import random_settings
from zerotune.config.errors import ExitCode
from zerotune.config.load import load_job
from zerotune.records import RunKind, Status
from zerotune.store.location import file_url
from zerotune.store.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster_address() -> Iterator[str]:
    """Two raylets on this machine, joined by the commands through $RAY_ADDRESS."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    yield cluster.address
    cluster.shutdown()


SMALL = ["--set", "model={gpt: {layers: 2, d_model: 32, heads: 2, sequence_length: 16}}"]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "zerotune", *args]


def environment(address: str | None = None) -> dict[str, str]:
    """Without the machine's own settings; with a running Ray to join, if ``address`` names one."""
    checkout = str(Path(__file__).parents[2])
    kept = {
        name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "ZEROTUNE_STORE")
    }
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    return kept if address is None else kept | {"RAY_ADDRESS": address}


def run(folder: Path, address: str | None, *args: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(*args), cwd=folder, env=environment(address), capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    assert "SIGTERM" not in done.stderr, "Ray speaks to its developers"
    return done.returncode, done.stdout, done.stderr


def zerotune(folder: Path, address: str | None, *args: str) -> str:
    """Run a command that must succeed in a folder; returns its stdout."""
    code, out, err = run(folder, address, *args)
    assert code == 0, err
    return out


def test_init_search_launch_results_on_two_nodes(tmp_path: Path, cluster_address: str) -> None:
    """A newcomer's way, with a search that is interrupted and gone on with."""
    zerotune(tmp_path, None, "init")
    small = (tmp_path / "model.yaml").read_text().replace("d_model: 256", "d_model: 32")
    (tmp_path / "model.yaml").write_text(small)
    two_nodes = ("--nodes", "2", "--procs-per-node", "1")
    searching = (
        *("search", "model.yaml", *two_nodes, "--space", "quick", "--trials", "2"),
        *("--set", "search.confirm_rounds=2", "--set", "search.max_steps=10"),
    )
    first = interrupted_after_the_first_trial(tmp_path, cluster_address, *searching)

    found = json.loads(zerotune(tmp_path, cluster_address, *searching, "--json"))
    assert found["trials"] == {"complete": 2}
    assert found["baseline"]["run_id"] == first, "the finished trial is kept"
    assert found["baseline"]["cluster"]["facts"]["nodes"] == 2
    assert found["speedup_ci"][0] <= found["speedup"] <= found["speedup_ci"][1]
    with Store.open(store_of(tmp_path)) as store:
        trials = [row for row in store.runs(kind=RunKind.TRIAL) if row.status is Status.COMPLETE]
        assert len({row.config.zero.model_dump_json() for row in trials}) == 2
        for row in trials:
            assert row.measurement is not None and len(row.measurement.step_times_s) >= 10
            assert len(store.ledgers(row.run_id)) == 2
        best = store.get_run(found["best"]["run_id"])
    assert load_job(tmp_path / "best.yaml").job == best.config

    launching = ("launch", *two_nodes, "--steps", "2", "--set", "train.save_every=2", "--json")
    launched = json.loads(zerotune(tmp_path, cluster_address, *launching))
    assert launched["status"] == "complete" and launched["steps"] == 2
    assert launched["config"]["zero"] == found["best"]["config"]["zero"]
    assert Path(launched["checkpoint"]).is_dir()

    table = zerotune(tmp_path, None, "results")
    assert found["best"]["run_id"] in table
    assert "2 nodes x 1 rank" in table

    code, _, err = run(tmp_path, "local", "launch", "--nodes", "2")
    assert code == ExitCode.RESOURCES and "ray start --head" in err


def interrupted_after_the_first_trial(folder: Path, address: str, *args: str) -> str:
    """Interrupt a search once its first trial is done; returns that trial's run."""
    search = subprocess.Popen(
        command(*args),
        cwd=folder,
        env=environment(address),
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
    search.send_signal(signal.SIGINT)
    _, rest = search.communicate(timeout=60)
    assert search.returncode == ExitCode.INTERRUPTED, lines
    assert rest.strip().splitlines()[-1].startswith("interrupted: ")
    with Store.open(store_of(folder)) as store:
        (first,) = [row for row in store.runs() if row.status is Status.COMPLETE]
        assert not store.runs(status=Status.RUNNING)
    return first.run_id


def store_of(folder: Path) -> str:
    return file_url(folder / "results" / "runs" / "zerotune.db")


def plain_loop(checkpoint: Path, steps: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The job that a checkpoint's run was given, trained by one plain process."""
    from tests.train.test_run import oracle
    from zerotune.config.load import load_job

    job = load_job(checkpoint.parents[1] / "config.resolved.yaml").job
    job = job.model_copy(update={"train": job.train.model_copy(update={"steps": steps})})
    losses, state = oracle(job)
    return losses[-1], state


def saved_parameters(checkpoint: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters of a checkpoint, read without zerotune."""
    import torch.distributed.checkpoint as dcp

    flat = {f"model/{name}": torch.zeros(value.numel()) for name, value in like.items()}
    dcp.load(flat, checkpoint_id=str(checkpoint), no_dist=True)
    return {name: flat[f"model/{name}"].view(value.shape) for name, value in like.items()}


@pytest.mark.parametrize(("number", "ray"), [(1, "local"), (2, "running")])
def test_parity_through_the_command_line(tmp_path: Path, cluster_address: str, number: int, ray: str) -> None:
    """On a Ray that the command starts and ends, and on one that runs."""
    (tmp_path / "model.yaml").write_text("model: {gpt: {}}\n")
    knobs = random_settings(5)[number]
    sets: list[str] = []
    for name, value in knobs.items():
        if value is not None:
            sets += ["--set", f"zero.{name}={json.dumps(value) if isinstance(value, bool) else value}"]
    document: dict[str, Any] = json.loads(
        zerotune(
            tmp_path, "local" if ray == "local" else cluster_address, "launch", "--nodes", "1", "--config", "default", "--json", "--steps", "50", *SMALL, *sets,
            "--procs-per-node", "2", "--set", "train.save_every=50", "--set", "train.optimizer.lr=1e-3",
        )
    )  # fmt: skip
    for name, value in knobs.items():
        assert document["config"]["zero"][name] == value, name
    checkpoint = Path(document["checkpoint"])
    loss, state = plain_loop(checkpoint, 50)
    assert document["final_loss"] == pytest.approx(loss, abs=1e-5)
    for name, value in saved_parameters(checkpoint, state).items():
        assert torch.allclose(value, state[name], atol=1e-5, rtol=0), name

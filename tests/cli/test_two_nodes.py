"""A newcomer on a cluster of two nodes, in an empty folder, by the command line alone; and parity through it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero.settings import random_settings

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SMALL = ["--set", "model={gpt: {layers: 2, d_model: 32, heads: 2, sequence_length: 16}}"]


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


def zerotune(folder: Path, address: str | None, *args: str, code: int = 0) -> str:
    """Run a command in a folder; returns its stdout."""
    checkout = str(Path(__file__).parents[2])
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "ZEROTUNE_STORE")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    if address is not None:
        environment["RAY_ADDRESS"] = address
    done = subprocess.run(
        [sys.executable, "-m", "zerotune", *args], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_init_search_launch_results_on_two_nodes(tmp_path: Path, cluster_address: str) -> None:
    zerotune(tmp_path, None, "init")
    (tmp_path / "model.yaml").write_text(
        (tmp_path / "model.yaml").read_text().replace("d_model: 256", "d_model: 32")
    )
    searched = json.loads(
        zerotune(
            tmp_path, cluster_address, "search", "model.yaml", "--nodes", "2", "--json", "--space", "quick",
            "--trials", "2", "--set", "search.confirm_rounds=2", "--set", "search.max_steps=10",
        )
    )  # fmt: skip
    assert searched["trials"] == {"complete": 2}
    assert searched["baseline"]["cluster"]["facts"]["nodes"] == 2

    launched = json.loads(
        zerotune(tmp_path, cluster_address, "launch", "--nodes", "2", "--json", "--steps", "3")
    )
    assert launched["status"] == "complete" and launched["steps"] == 3
    assert launched["config"]["zero"] == searched["best"]["config"]["zero"]

    table = zerotune(tmp_path, None, "results")
    assert searched["best"]["run_id"] in table
    assert "2 nodes x 2 ranks" in table


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


@pytest.mark.parametrize("number", [1, 2])
def test_parity_through_the_command_line(tmp_path: Path, number: int) -> None:
    (tmp_path / "model.yaml").write_text("model: {gpt: {}}\n")
    knobs = random_settings(5)[number]
    sets: list[str] = []
    for name, value in knobs.items():
        if value is not None:
            sets += ["--set", f"zero.{name}={json.dumps(value) if isinstance(value, bool) else value}"]
    document: dict[str, Any] = json.loads(
        zerotune(
            tmp_path, None, "launch", "--config", "default", "--json", "--steps", "50", *SMALL, *sets,
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

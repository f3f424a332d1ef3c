"""``zerotune bench`` for real, over a shaped link between two hosts of this machine; and what is wrong with its options."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerotune.cli.main import run
from zerotune.cluster.shaped_link import bits_per_second, shaped_link, sweep
from zerotune.config.errors import UsageError

MODEL = """
model:
  gpt: {layers: 2, d_model: 32, heads: 2, sequence_length: 16}
data: {synthetic: {}}
train: {global_batch_size: 8}
"""


def can_make_namespaces() -> bool:
    if shutil.which("ip") is None or shutil.which("tc") is None or len(os.sched_getaffinity(0)) < 2:
        return False
    name = f"zttest{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


@pytest.mark.skipif(not can_make_namespaces(), reason="no right to make network namespaces")
def test_engines_in_turns_over_a_link(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL)
    options = ("--link", "500mbit", "--rounds", "2", "--steps", "1", "--set", "model.gpt.d_model=48")
    engines_of = ("--engines", "ddp,zerotune,zerotune:keep,fsdp2", "--variant", "keep=zero.release=keep")
    document: dict[str, Any] = json.loads(
        said(tmp_path, "bench", *options, *engines_of, "--plot", "plot.html", "--json")
    )
    assert list(document["engines"]) == ["zerotune", "zerotune:keep", "ddp", "fsdp2", "compute"]
    engines = document["engines"]
    for name in ("zerotune", "zerotune:keep", "ddp", "fsdp2"):
        assert engines[name]["final_loss"] == pytest.approx(engines["zerotune"]["final_loss"], abs=1e-5)
        assert engines[name]["peak_memory_bytes"] > 0 and len(engines[name]["round_times_s"]) == 2
        assert document["ratios"][f"{name}/limit"]["median"] > 0
        # The threads of a rank share the cores that it has, half of the machine's.
        spent, wall = (
            engines[name]["program_s"] + engines[name]["kernel_s"],
            sum(engines[name]["round_times_s"]) / 2,
        )
        assert 0 < spent <= 1.05 * wall * len(os.sched_getaffinity(0)) / 2
    assert document["ratios"].keys() >= {"zerotune/zerotune:keep", "zerotune/ddp", "zerotune/fsdp2"}
    parameters = document["parameters"]
    assert engines["ddp"]["sent_bytes"] == 4 * 2 * parameters / 2
    assert engines["fsdp2"]["sent_bytes"] == 4 * 3 * parameters / 2
    assert engines["zerotune:keep"]["sent_bytes"] == pytest.approx(4 * 2 * parameters / 2, rel=0.2)
    assert document["ranks"] == 2 and document["backend"] == "gloo"
    assert "zerotune:keep" in (tmp_path / "plot.html").read_text()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    assert f"zt{os.getpid()}" not in left
    for name in ("zerotune", "zerotune:keep"):
        figures = engines[name]
        assert figures["collectives"] == sum(flow["count"] for flow in figures["flows"].values())
        assert figures["sent_bytes"] == sum(flow["sent_bytes"] for flow in figures["flows"].values())
        assert figures["exposed_s"] > 0 and figures["hidden_s"] > 0
        assert 0 < figures["peak_live_elements"] <= 2.1 * parameters
    assert engines["zerotune:keep"]["collectives"] < engines["zerotune"]["collectives"]
    assert "flows" not in engines["ddp"]
    assert_kept(tmp_path, document)


def said(folder: Path, *arguments: str) -> str:
    """What a command prints that succeeds."""
    done = subprocess.run(
        [sys.executable, "-m", "zerotune", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_kept(folder: Path, document: dict[str, Any]) -> None:
    """The benchmark is a run of the store, and can be shown any time later."""
    run_id = document["run_id"]
    shown = json.loads(said(folder, "show", run_id, "--json"))
    assert (shown["kind"], shown["status"]) == ("bench", "complete")
    assert shown["bench"] == {key: value for key, value in document.items() if key != "run_id"}
    assert shown["cluster"]["facts"]["link"] == "0.5 Gbit/s between two hosts of one machine"
    assert (shown["cluster"]["facts"]["nodes"], shown["cluster"]["facts"]["ranks_per_node"]) == (2, 1)
    knobs = document["engines"]["zerotune:keep"]["knobs"]
    assert knobs["release"] == "keep" and isinstance(knobs["prefetch_distance"], int)
    assert (
        isinstance(shown["config"]["zero"]["prefetch_distance"], int)
        and "knobs" not in document["engines"]["ddp"]
    )
    explanation = json.loads(said(folder, "explain", run_id, "--json"))
    assert explanation["ranks"] == 2 and {flow["purpose"] for flow in explanation["flows"]} >= {
        "forward",
        "gradient",
    }
    table = said(folder, "show", run_id)
    assert "zerotune:keep" in table and "engines in turns" in table
    listed = said(folder, "results")
    assert run_id in listed and f"ddp {document['ratios']['zerotune/ddp']['median']:.2f}" in listed
    (row,) = json.loads(said(folder, "results", "--json"))["runs"]
    assert row["run_id"] == run_id and row["rank"] is None and row["tokens_per_second"] is None


@pytest.mark.skipif(not can_make_namespaces(), reason="no right to make network namespaces")
def test_a_benchmark_that_fails_says_so_in_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    Path("model.yaml").write_text(MODEL)
    options = ("--engines", "zerotune,ddp", "--link", "1gbit", "--set", "train.precision=bf16")
    assert run(("bench", *options)) != 0
    assert "ddp is compared in fp32 only" in capsys.readouterr().err
    assert run(("results", "--json")) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["status"] in ("failed", "not_launched") and "fp32 only" in row["failure"]["message"]


HOLD = """
import sys, time
from zerotune.cluster.shaped_link import shaped_link
with shaped_link(1e9):
    print("made", flush=True)
    time.sleep(60)
"""


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.mark.skipif(not can_make_namespaces(), reason="no right to make network namespaces")
def test_what_a_killed_driver_left_goes_with_the_next(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    drivers = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=env)
        for _ in range(2)
    ]
    dead, living = ({f"zt{driver.pid}n{i}" for i in range(2)} for driver in drivers)
    try:
        for driver in drivers:
            assert driver.stdout is not None and driver.stdout.readline() == "made\n"
        drivers[0].kill()
        drivers[0].wait()
        assert dead | living <= namespaces()
        with shaped_link(1e9) as hosts:
            own = {host.namespace for host in hosts}
            assert own | living <= namespaces() and not dead & namespaces()
        assert living <= namespaces() and not own & namespaces()
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()
            driver.stdout.close()  # type: ignore[union-attr]
        sweep()
    assert not living & namespaces()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engines", "ddp"), "--engines has no zerotune in it"),
        (("--engines", "zerotune,zerotune:best"), "--variant best=best.yaml"),
        (("--variant", "best"), "--variant best is not NAME=FILE"),
        (("--link", "fast"), "write it as 2gbit or 500mbit"),
        (("--engines", "zerotune,dpp"), "there is no engine dpp"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text(MODEL)
    assert run(("bench", *options)) == 2
    assert words in capsys.readouterr().err


def test_rates() -> None:
    assert bits_per_second("2gbit") == 2e9
    assert bits_per_second(" 500Mbit") == 5e8
    for wrong in ("2", "gbit", "-1gbit", "0mbit"):
        with pytest.raises(UsageError):
            bits_per_second(wrong)

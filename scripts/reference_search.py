"""Search on links: `zerotune search` over two Ray nodes, each in a network namespace, and what it finds best on each link.

Run it on a quiet machine with two cores and the right to make network namespaces; a search takes ten to seventeen minutes::

    python scripts/reference_search.py [--trials 16] [--turns 16] [--links 2gbit]
        [--set model.gpt.d_model=512 --name search-34m]

``reference_bench.py`` takes what is found here as the engine ``zerotune:best`` of the benchmark ``gpt-10m``, or ``gpt-34m``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reference import JOB, LINKS, head, mebibytes, meta_model, parser, publish, row

from zerotune.cluster.shaped_link import Host, bits_per_second, shaped_link

_PORT = 6379
_START_S = 60.0
_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled"}
"""The head and the other node agree, whatever token lies on this machine."""


@contextmanager
def ray_nodes(hosts: tuple[Host, Host], folder: str) -> Iterator[str]:
    """One Ray node in each namespace, on a core of its own; yields the address."""
    first, _ = hosts
    address = f"{first.ip}:{_PORT}"
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for core, host in enumerate(hosts):
            head_alone = [
                "--head",
                f"--port={_PORT}",
                "--include-dashboard=false",
                f"--temp-dir={folder}/ray",
            ]
            joins = head_alone if host is first else [f"--address={address}"]
            nodes.append(
                subprocess.Popen(
                    [
                        *_inside(host, core),
                        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *joins),
                        *(f"--node-ip-address={host.ip}", "--num-cpus=1", "--disable-usage-stats"),
                    ],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env=os.environ | _ENVIRONMENT,
                )
            )
            time.sleep(10.0 if host is first else 5.0)  # the search waits for nodes that take longer
        yield address
    finally:
        for node in reversed(nodes):
            with_its_children = os.getpgid(node.pid)
            node.terminate()
            try:
                node.wait(_START_S)
            except subprocess.TimeoutExpired:
                os.killpg(with_its_children, signal.SIGKILL)
                node.wait()


def _inside(host: Host, core: int) -> list[str]:
    return ["ip", "netns", "exec", host.namespace, "taskset", "-c", str(core)]


def search(link: str, trials: int, turns: int, sets: list[str]) -> dict[str, Any]:
    """What ``zerotune search --json`` finds on a link, in so many trials, and rounds in turns at its end.

    Args:
        link: Its name.
        trials: How many.
        turns: Rounds.
        sets: Further ``--set`` options.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = shutil.copy(JOB, folder)  # the best is written beside it
        command = [
            *(sys.executable, "-m", "zerotune", "search", model, "--json"),
            *("--trials", str(trials), "--set", f"search.confirm_rounds={turns}"),
            *("--seed", "0", "--store", f"{folder}/search.db"),
            *(word for setting in sets for word in ("--set", setting)),
        ]
        if link == "loopback":
            return _result([*command, "--address", "local"], folder)
        with shaped_link(bits_per_second(link)) as hosts, ray_nodes(hosts, folder) as address:
            placed = ["--address", address, "--nodes", "2", "--procs-per-node", "1"]
            return _result([*_inside(hosts[0], 0), *command, *placed], folder)


def _result(command: list[str], folder: str) -> dict[str, Any]:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | _ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return _kept(found)


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    """What of the result is kept: every run that was measured in turns is on the Pareto front or beside it."""
    runs = [_run(run) for run in found["pareto"] if run["in_turns"]]
    search = {
        key: found[key] for key in ("trials", "rounds_in_turns", "is_tie", "ended_because", "wall_seconds")
    }
    return search | {"best": _run(found["best"]), "in_turns": runs}


def _run(run: dict[str, Any]) -> dict[str, Any]:
    keys = ("changes", "peak_memory_bytes", "tokens_per_second", "speedup", "speedup_ci", "in_turns")
    return {key: run[key] for key in keys}


def best_setting(found: dict[str, Any]) -> str:
    """What a search found best, as ``zerotune bench --variant`` takes it; nothing for the defaults."""
    return _setting(found["best"])


def _setting(run: dict[str, Any]) -> str:
    return ",".join(f"{path}={_word(value)}" for path, value in run["changes"].items())


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def table(found: dict[str, dict[str, Any]], sets: list[str]) -> str:
    """The runs that were measured in turns on each link, the best first."""
    model = " with ".join(["`examples/bench.yaml`", *(f"`{setting}`" for setting in sets)])
    parameters = sum(param.numel() for param in meta_model(sets).parameters())
    lines = [
        "# What `zerotune search` finds",
        "",
        f"GPT of {parameters / 1e6:.1f} M parameters ({model}), two Ray nodes of one rank each, space `default`, "
        "objective throughput. At its end a search measures the defaults and the fastest in turns; of those that cannot be told "
        "apart it takes the one with the smaller peak.",
    ]
    for link, result in found.items():
        trials = ", ".join(f"{count} {status}" for status, count in result["trials"].items() if count)
        lines += [
            "",
            f"## {LINKS[link]}",
            "",
            f"{trials}, {result['rounds_in_turns']} rounds in turns, {result['wall_seconds'] / 60:.1f} min"
            + (", a tie with the defaults." if result["is_tie"] else "."),
            "",
            *head(["", "setting", "faster than the defaults", "peak memory"]),
        ]
        best = result["best"]
        for run in [best, *(each for each in result["in_turns"] if each["changes"] != best["changes"])]:
            low, high = run["speedup_ci"]
            faster = f"{run['speedup']:.3f} [{low:.3f}, {high:.3f}]"
            setting = f"`{_setting(run)}`" if run["changes"] else "the defaults"
            lines.append(
                row(["best" if run is best else "", setting, faster, mebibytes(run["peak_memory_bytes"])])
            )
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """What was found, by link."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def main() -> None:
    options = parser(__doc__, rounds=0, links=list(LINKS))
    options.add_argument("--trials", type=int, default=16)
    options.add_argument(
        "--turns", type=int, default=16, help="rounds in turns, in which the fastest are told apart"
    )
    options.add_argument("--name", default="search-10m")
    options.add_argument("--set", action="append", default=[], dest="sets")
    given = options.parse_args()
    path = given.folder / f"{given.name}.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and take the nodes with it
    found = read(path)
    for link in given.links:
        if not given.reuse or link not in found:
            found[link] = search(link, given.trials, given.turns, given.sets)
            path.write_text(json.dumps(found, indent=1) + "\n")
    publish(given.folder, given.name, table(found, given.sets), None)


if __name__ == "__main__":
    main()

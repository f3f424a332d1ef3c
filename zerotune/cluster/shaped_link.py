"""Two hosts on one machine, with a link of a chosen rate between them: what a slow network does, without a second machine.

Every rank lives in a network namespace of its own, on cores of its own, and reaches the other through a pair of
virtual interfaces that a token bucket shapes (``ip netns``, ``tc … tbf``). It needs Linux and the right to make
namespaces.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from zerotune.config.errors import ResourceError, RunFailed, UsageError

T = TypeVar("T")

RANKS = 2
_OURS = re.compile(r"\b(zt(\d+)[nv]\d)\b")
"""Namespaces and interfaces, and the process that made them."""

_LINE = 200
"""Characters of a rank's last line of log that an error quotes."""


@dataclass(frozen=True)
class Host:
    """One of the two.

    Attributes:
        namespace: Name of its network namespace.
        interface: Its end of the link.
        ip: Its address there.
    """

    namespace: str
    interface: str
    ip: str


def sweep() -> list[str]:
    """Remove what a driver that was killed left behind: namespaces and interfaces whose name carries its process.

    A process that was given the number of a dead driver keeps that driver's for as long as it runs.

    Returns:
        Names of what is gone now.
    """
    gone = []
    for kind, listing in (("netns", ("ip", "netns", "list")), ("link", ("ip", "-o", "link", "show"))):
        listed = subprocess.run(listing, capture_output=True, text=True, check=False).stdout
        for name, owner in _OURS.findall(listed):
            if int(owner) != os.getpid() and _is_alive(int(owner)):
                continue
            if not subprocess.run(["ip", kind, "del", name], capture_output=True, check=False).returncode:
                gone.append(name)
    return gone


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def shaped_link(bits_per_s: float) -> Iterator[tuple[Host, Host]]:
    """Two namespaces and the link between them; both are gone afterwards.

    Args:
        bits_per_s: Rate of the link in each direction.

    Raises:
        ResourceError: This machine cannot make them.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise ResourceError("--link needs the commands ip and tc", "install iproute2")
    sweep()
    tag = f"zt{os.getpid()}"
    net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    hosts = tuple(Host(f"{tag}n{i}", f"{tag}v{i}", f"{net}.{i + 1}") for i in range(RANKS))
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        first, second = hosts
        _run("ip", "link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        for host in hosts:
            _run("ip", "link", "set", host.interface, "netns", host.namespace)
            inside = ("ip", "netns", "exec", host.namespace)
            _run(*inside, "ip", "addr", "add", f"{host.ip}/24", "dev", host.interface)
            _run(*inside, "ip", "link", "set", host.interface, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            # A bucket holds what the rate lets through between two ticks of the kernel's slowest clock (100 Hz).
            burst = max(int(bits_per_s / 8 / 100), 64 * 1024)
            _run(
                *inside, "tc", "qdisc", "add", "dev", host.interface, "root", "tbf",
                "rate", f"{int(bits_per_s)}bit", "burst", str(burst), "latency", "200ms",
            )  # fmt: skip
        yield first, second
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


def run_over_link(
    bits_per_s: float, function: Callable[[Any, Any], T], argument: Any, run_dir: str, limit_s: float
) -> list[T]:
    """Call ``function(context, argument)`` on two ranks, one per host; returns their answers in rank order.

    Args:
        bits_per_s: Rate of the link between them.
        function: Takes a :class:`zerotune.train.context.RankContext` and the argument; both must be picklable.
        argument: The same on both.
        run_dir: Folder of the run; every rank's output is a file in it.
        limit_s: Longer than this is an error.

    Raises:
        ResourceError: The hosts cannot be made.
        RunFailed: A rank failed, or the limit was reached.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        raise ResourceError(f"two hosts need two cores, this machine offers {len(cores)}")
    logs = Path(run_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, shaped_link(bits_per_s) as hosts:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((function, argument)))
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, host in enumerate(hosts):
                share = cores[rank::RANKS]
                answer = Path(folder) / f"answer{rank}"
                with open(logs / f"rank{rank}.log", "wb") as log:
                    ranks.append(
                        subprocess.Popen(
                            [
                                *("ip", "netns", "exec", host.namespace),
                                *(sys.executable, "-m", "zerotune.cluster.linked_rank"),
                                *(str(call), str(answer), run_dir, str(rank), str(RANKS), hosts[0].ip),
                                *(host.interface, ",".join(map(str, share))),
                            ],
                            stdout=log,
                            stderr=log,
                            stdin=subprocess.DEVNULL,
                        )
                    )
            _wait(ranks, logs, limit_s)
            return [pickle.loads((Path(folder) / f"answer{rank}").read_bytes()) for rank in range(RANKS)]
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], logs: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            raise RunFailed(f"rank {failed} failed: {_last_line(logs / f'rank{failed}.log')}", f"see {logs}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise RunFailed(f"the ranks took longer than {limit_s:g} s", f"see {logs}")
        time.sleep(0.05)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:_LINE] if lines else "it left no word"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(
            f"{' '.join(command[:4])} failed: {done.stderr.strip()}",
            "--link needs the right to make network namespaces (root, or CAP_NET_ADMIN and CAP_SYS_ADMIN)",
        )


def bits_per_second(rate: str) -> float:
    """``2gbit``, ``500mbit``: the spelling of ``tc``.

    Raises:
        UsageError: It is not such a rate.
    """
    text = rate.strip().lower()
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * factor
            except ValueError:
                break
            if value > 0:
                return value
    raise UsageError(f"--link {rate} is no rate", "write it as 2gbit or 500mbit")

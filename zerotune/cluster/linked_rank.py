"""The process of one rank on a shaped link: joins the group, makes its call, leaves its answer in a file."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from zerotune.cluster.host_memory import keep_freed_memory
from zerotune.cluster.logs import FORMAT
from zerotune.train.context import Progress

_PORT = 29_500  # alone in its namespace, nobody else can have it


@dataclass
class LinkedContext:
    """What the rank knows of its surroundings: :class:`zerotune.train.context.RankContext`."""

    rank: int
    world_size: int
    run_dir: str
    local_rank: int = 0
    node: str = "link"
    device: str = "cpu"

    def report(self, progress: Progress) -> None:
        """To the log."""
        print(f"{progress.phase} {progress.step}/{progress.steps}", flush=True)


def _end_with(driver: int) -> None:
    """Nobody waits for an answer once the driver is gone, however it ended."""
    while os.getppid() == driver:
        time.sleep(1.0)
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Called with the paths of call and answer, folder, rank, ranks, rank 0's address, interface and cores."""
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    keep_freed_memory()
    call, answer, run_dir, rank, ranks, address, interface, cores = arguments
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.setdefault("OMP_NUM_THREADS", str(len(cores.split(","))))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(len(cores.split(",")))
    store = dist.TCPStore(address, _PORT, int(ranks), is_master=rank == "0", timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks))
    function, argument = pickle.loads(Path(call).read_bytes())
    result = function(LinkedContext(int(rank), int(ranks), run_dir), argument)
    Path(answer).write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Everything that one command needs to run things: the store, the cluster, the ranks, in the right order and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zerotune.cluster.join import Cluster, PlacementRequest, join
from zerotune.config.schema import JobConfig
from zerotune.records import Fingerprint
from zerotune.runs.cluster_key import cluster_fingerprint, device_model
from zerotune.runs.execute import Executor
from zerotune.runs.folders import runs_root
from zerotune.runs.reap import open_reaped
from zerotune.runs.workers import RayWorkers
from zerotune.store.store import Store

DEFAULT_PROCS_PER_NODE = 2


@dataclass(frozen=True)
class Placement:
    """What the command line says about where to run; ``None`` leaves it to the file, and that to the cluster."""

    nodes: int | None = None
    procs_per_node: int | None = None
    local_nodes: int | None = None
    address: str | None = None

    def request(self, job: JobConfig, gpus: int) -> PlacementRequest:
        """The request to the cluster.

        Args:
            job: Its ``cluster`` section says what the command line leaves open.
            gpus: GPUs of this machine. ``cluster.procs_per_node`` is for machines without them; those with them get
                one rank per GPU.
        """
        cluster = job.cluster
        nodes = self.nodes or (None if self.local_nodes else cluster.nodes)
        procs = self.procs_per_node or (None if gpus else cluster.procs_per_node)
        address = None if self.local_nodes else self.address or cluster.address
        return PlacementRequest(nodes, procs, self.local_nodes, address, cluster.wait)

    def expected_shape(self, job: JobConfig, gpus: int) -> tuple[int, int]:
        """Nodes and ranks per node, as far as they can be told without asking a cluster."""
        request = self.request(job, gpus)
        nodes = request.nodes or self.local_nodes or 1
        return nodes, request.procs_per_node or gpus or DEFAULT_PROCS_PER_NODE


@dataclass(frozen=True)
class Session:
    """Where things can be run.

    Attributes:
        store: The database.
        cluster: The Ray that was joined or started.
        fingerprint: Its key.
        ranks: Number of data-parallel ranks.
        executor: Runs things there. Its ranks start with the first run.
    """

    store: Store
    cluster: Cluster
    fingerprint: Fingerprint
    ranks: int
    executor: Executor


def visible_gpus() -> int:
    """GPUs of this machine, without taking any of their memory."""
    import torch

    return torch.cuda.device_count()


@contextmanager
def session(
    job: JobConfig, placement: Placement, store_url: str, on_line: Callable[[str], None]
) -> Iterator[Session]:
    """Open the store, join or start a cluster, and close all of it afterwards.

    Args:
        job: The configuration.
        placement: What the command line says.
        store_url: From :func:`zerotune.store.location.store_url`.
        on_line: Told a line about what is joined, started, waited for or left behind.

    Raises:
        UsageError: The store cannot be used.
        ResourceError: There is no cluster, or no room on it.
    """
    with open_reaped(store_url, on_line) as store:
        cluster = join(placement.request(job, visible_gpus()), on_line)
        try:
            on_line(cluster.description)
            shape = cluster.shape
            fingerprint = cluster_fingerprint(
                device_model(shape.gpu), shape.procs_per_node, shape.nodes, job.cluster.link
            )
            workers = RayWorkers(cluster, job.cluster.threads_per_rank)
            executor = Executor(store, workers, fingerprint, Path(runs_root(store_url)))
            try:
                yield Session(store, cluster, fingerprint, shape.world_size, executor)
            finally:
                executor.close()
        finally:
            cluster.close()

"""What passes between the driver, a supervisor and its rank process. Plain dataclasses: nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass, field

from zerotune.records.status import Status
from zerotune.train.context import Progress


@dataclass(frozen=True)
class RankPlace:
    """Where a rank lives.

    Attributes:
        rank: Its number in the whole group.
        local_rank: Its number on its node.
        node_rank: Number of its node; ranks of one node are consecutive.
        node_id: Ray's id of the node. Two nodes of one machine differ in it, not in ``ip``.
        node_name: Host name, for people.
        ip: Address of the node as Ray knows it.
        device_ids: Numbers of its accelerators on the node, empty on CPU.
        slot: Which of the supervisors serves it, in the order they were created.
    """

    rank: int
    local_rank: int
    node_rank: int
    node_id: str
    node_name: str
    ip: str
    device_ids: tuple[int, ...]
    slot: int = 0


@dataclass(frozen=True)
class SupervisorFacts:
    """What a supervisor tells of its surroundings."""

    node_id: str
    node_name: str
    ip: str
    pid: int
    device_ids: tuple[int, ...]
    cores: int


# ------------------------------------------------------------------------- from the supervisor to the rank process


@dataclass(frozen=True)
class Listen:
    """To rank 0: open the rendezvous store on a port that the system chooses."""

    ip: str
    world_size: int


@dataclass(frozen=True)
class JoinWorld:
    """Become a rank: with ``world_size > 1``, initialise ``torch.distributed`` through the store at ``ip:port``."""

    rank: int
    local_rank: int
    world_size: int
    node: str
    ip: str
    device: str
    backend: str
    threads: int
    store_ip: str = ""
    store_port: int = 0


@dataclass(frozen=True)
class RunTask:
    """Call ``fn(context, arg)``; ``call`` is the pickled pair."""

    call: bytes
    run_dir: str


# ------------------------------------------------------------------------- from the rank process to the supervisor


@dataclass(frozen=True)
class Ready:
    """The process is up."""

    pid: int


@dataclass(frozen=True)
class Listening:
    """The rendezvous store's real port."""

    port: int


@dataclass(frozen=True)
class Joined:
    """The rank is part of the world."""


@dataclass(frozen=True)
class Started:
    """The call was unpickled, and ``fn`` is entered now."""


@dataclass(frozen=True)
class Reported:
    """The latest progress, and how many there have been."""

    count: int
    progress: Progress


@dataclass(frozen=True)
class Done:
    """``fn`` returned; ``result`` is pickled."""

    result: bytes


@dataclass(frozen=True)
class RankFault:
    """Why one rank did not end well.

    Attributes:
        status: Kind of failure.
        message: One line, without the rank and the node.
        is_clause: Whether ``message`` goes on after "rank 1 on node" ("was killed by SIGKILL") or stands alone.
        at: When it was noticed, seconds since the epoch on that rank's clock.
        collateral: Whether it looks like the consequence of another rank's failure.
        rank: Which rank; filled in by the driver.
        phase: What the rank was doing.
        traceback: Python traceback, if there is one.
        log_path: The rank's log file.
        remedy: What the user can do about it.
        error: A pickled :class:`~zerotune.config.errors.ZerotuneError`, if that is what was raised.
    """

    status: Status
    message: str
    at: float
    is_clause: bool = True
    collateral: bool = False
    rank: int | None = None
    phase: str | None = None
    traceback: str | None = None
    log_path: str | None = None
    remedy: str | None = None
    error: bytes | None = None


# ----------------------------------------------------------------------------------- from the supervisor to the driver


@dataclass(frozen=True)
class RankState:
    """How a rank stands right now, told by its supervisor even when the rank itself is stuck.

    Attributes:
        process: ``running``, ``stopped`` (SIGSTOP) or ``dead``.
        started: Whether ``fn`` was entered.
        count: How many progress reports there have been in this run.
        progress: The latest one.
    """

    process: str
    started: bool = False
    count: int = 0
    progress: Progress | None = None


@dataclass(frozen=True)
class Limits:
    """How long a run may take, in seconds; ``None`` is for ever.

    Attributes:
        start_s: Until every rank has entered the callable.
        first_progress_s: From then to the first report of progress of any rank.
        silence_s: Between two reports of a rank that has reported before.
        total_s: For all of it.
    """

    start_s: float | None = 120.0
    first_progress_s: float | None = 600.0
    silence_s: float | None = 600.0
    total_s: float | None = None


@dataclass
class WorldShape:
    """How many ranks, where.

    Attributes:
        nodes: Number of nodes.
        procs_per_node: Ranks on each of them.
        gpu: Whether each rank has a GPU of its own.
    """

    nodes: int
    procs_per_node: int
    gpu: bool = False
    node_ids: tuple[str, ...] = field(default_factory=tuple)

    @property
    def world_size(self) -> int:
        return self.nodes * self.procs_per_node

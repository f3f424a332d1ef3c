"""The process of one rank: its supervisor talks to it through a pipe, and learns how it ends.

It is a process of its own, not a Ray worker: so its exit code and its signal are known, it can be seen to be stopped,
and it can be killed and waited for. Ray itself is not imported here, so that neither its threads nor
its memory are part of what is measured, and user code runs in the main thread.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from zerotune.cluster.faults import fault_of
from zerotune.cluster.host_memory import keep_freed_memory
from zerotune.cluster.logs import rank_log_path, route_output
from zerotune.cluster.messages import (
    Done,
    Joined,
    JoinWorld,
    Listen,
    Listening,
    Ready,
    Reported,
    RunTask,
    Started,
)
from zerotune.train.context import Progress

REPORT_INTERVAL_S = 0.15

# What the template tells its supervisor: that it is ready, then for each fork the process number and how it ended.
IMPORTED = b"R"
NUMBER = struct.Struct("<q")


@dataclass
class ProcessContext:
    """What a rank knows of its surroundings: :class:`zerotune.train.context.RankContext` of a rank process."""

    rank: int
    world_size: int
    local_rank: int
    node: str
    device: str
    run_dir: str
    count: int = 0
    latest: Progress | None = None
    _changed: threading.Event = field(default_factory=threading.Event)

    def report(self, progress: Progress) -> None:
        """Keep the latest progress; a thread sends it on. Cheap, never blocks."""
        self.latest = progress
        self.count += 1
        self._changed.set()


class RankProcess:
    """Serves its supervisor: becomes a rank once, then runs one task after another."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._store: Any = None
        self._world: JoinWorld | None = None
        self._context: ProcessContext | None = None

    def serve(self) -> None:
        self._send(Ready(os.getpid()))
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                return
            log_path = None
            try:
                match message:
                    case Listen():
                        self._send(Listening(self._listen(message)))
                    case JoinWorld():
                        self._join(message)
                        self._send(Joined())
                    case RunTask():
                        assert self._world is not None
                        path = rank_log_path(message.run_dir, self._world.rank)
                        log_path = str(path)
                        route_output(path)
                        self._send(Done(self._run(message)))
            except BaseException as error:
                phase = "setup"
                if self._context is not None and self._context.latest is not None:
                    phase = self._context.latest.phase
                if isinstance(message, RunTask):
                    import traceback

                    traceback.print_exc()
                self._send(fault_of(error, phase=phase, log_path=log_path))

    def _send(self, message: object) -> None:
        with self._sending:
            self._connection.send(message)

    def _listen(self, message: Listen) -> int:
        """Open the store on port 0: the port is bound before anyone is told of it."""
        import torch.distributed as dist

        self._store = dist.TCPStore(
            message.ip, 0, message.world_size, is_master=True, wait_for_workers=False, use_libuv=True
        )
        return int(self._store.port)

    def _join(self, message: JoinWorld) -> None:
        self._world = message
        _choose_interface(message.ip)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(message.threads)
        if message.device.startswith("cuda"):
            torch.cuda.set_device(message.device)
        if message.world_size == 1:
            return
        store = self._store
        if store is None:
            store = dist.TCPStore(message.store_ip, message.store_port, message.world_size, is_master=False)
        os.environ.update(
            RANK=str(message.rank), LOCAL_RANK=str(message.local_rank), WORLD_SIZE=str(message.world_size)
        )
        options: dict[str, Any] = (
            {"device_id": torch.device(message.device)} if message.backend == "nccl" else {}
        )
        dist.init_process_group(
            message.backend, store=store, rank=message.rank, world_size=message.world_size, **options
        )
        # Every rank has every connection before the first run begins.
        dist.barrier()

    def _run(self, task: RunTask) -> bytes:
        world = self._world
        assert world is not None
        self._context = context = ProcessContext(
            world.rank, world.world_size, world.local_rank, world.node, world.device, task.run_dir
        )
        fn, arg = pickle.loads(task.call)
        self._send(Started())
        over = threading.Event()
        reporter = threading.Thread(
            target=self._send_reports, args=(context, over), name="reports", daemon=True
        )
        reporter.start()
        try:
            return pickle.dumps(fn(context, arg))
        finally:
            over.set()
            context._changed.set()
            reporter.join()

    def _send_reports(self, context: ProcessContext, over: threading.Event) -> None:
        """Send the latest progress at a bounded rate, and the very last one in any case."""
        while not over.is_set():
            context._changed.wait()
            self._send_latest(context)
            over.wait(REPORT_INTERVAL_S)
        self._send_latest(context)

    def _send_latest(self, context: ProcessContext) -> None:
        if not context._changed.is_set():
            return
        context._changed.clear()
        if context.latest is None:
            return
        try:
            self._send(Reported(context.count, context.latest))
        except OSError:
            os._exit(1)  # The supervisor is gone, and with it whoever wanted the result.


def _choose_interface(ip: str) -> None:
    """Make gloo and NCCL use the interface that holds the address by which Ray knows this node."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return


def _die_with(parent: int) -> None:
    """End this process when its parent ends, even if it is stopped or stuck."""
    if sys.platform.startswith("linux"):
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """The template: imports what every rank needs once, then forks a rank whenever it is asked to.

    A fork takes milliseconds where a new interpreter with torch takes seconds of every core, so a rank that did not
    end clean is replaced at little cost. Nothing here starts a thread or touches a device before the fork.
    """
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    _die_with(parent)
    control.set_inheritable(False)
    # Ray blocks SIGINT in everything it starts; user code should find signals as in any program. A terminal's
    # Ctrl-C does not arrive here: ranks are in sessions of their own.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    keep_freed_memory()
    import torch
    import torch.distributed  # noqa: F401

    gc.collect()
    gc.freeze()
    control.sendall(IMPORTED)
    me = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve_as_rank(descriptors[0], me)
        os.close(descriptors[0])
        control.sendall(NUMBER.pack(pid))
        _, status = os.waitpid(pid, 0)
        control.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _serve_as_rank(descriptor: int, template: int) -> NoReturn:
    """Be a rank until the supervisor hangs up."""
    os.setsid()
    _die_with(template)
    RankProcess(Connection(descriptor)).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Threads of user code or of gloo must not hold the process back.


if __name__ == "__main__":
    main()

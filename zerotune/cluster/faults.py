"""What went wrong: from an exception, a signal or a lost node to a status and one line."""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
import traceback as traceback_module
from dataclasses import replace
from pathlib import Path

from zerotune.cluster.logs import tail
from zerotune.cluster.messages import RankFault, RankPlace
from zerotune.config.errors import RunFailed, ZerotuneError
from zerotune.records import Failure, Status

# What gloo and NCCL say on the ranks that were waiting for one that is gone.
_COLLATERAL = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket Timeout",
    "Socket closed",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "ncclSystemError",
    "Watchdog caught collective operation timeout",
    "Received data size doesn't match expected size",
)
_CPU_ALLOCATOR = (
    "DefaultCPUAllocator",
    "not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
)


class GroupFailed(RunFailed):
    """A run on a worker group did not end well.

    Attributes:
        failure: The first cause.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, failure.remedy)
        self.failure = failure

    def __reduce__(self) -> tuple[type[GroupFailed], tuple[Failure]]:
        return type(self), (self.failure,)


def is_collateral(text: str) -> bool:
    """Whether an error's text is what ranks say when *another* rank is gone."""
    return any(mark in text for mark in _COLLATERAL)


def classify(error: BaseException) -> Status:
    """The status that an exception raised on a rank stands for."""
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error)
    if "OutOfMemoryError" in names:
        # torch's and Ray's have one name; Ray's is about the memory of the host.
        return Status.OOM_HOST if type(error).__module__.startswith("ray") else Status.OOM_DEVICE
    if isinstance(error, MemoryError):
        return Status.OOM_HOST
    if isinstance(error, RuntimeError) and any(mark in text for mark in _CPU_ALLOCATOR):
        return Status.OOM_DEVICE
    return Status.FAILED


def fault_of(error: BaseException, *, phase: str | None, log_path: str | None) -> RankFault:
    """What is told of an exception raised on a rank. Text travels, so that no exception needs to survive pickling."""
    status = classify(error)
    first_line = next((line for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    if isinstance(error, SystemExit):
        message = f"called sys.exit({error.code!r}) before the run was over"
    elif isinstance(error, ZerotuneError):
        message = error.message
    elif status is Status.OOM_DEVICE:
        message = f"ran out of device memory: {first_line}"
    elif status is Status.OOM_HOST:
        message = f"ran out of host memory: {name}: {first_line}" if first_line else "ran out of host memory"
    else:
        message = f"{name}: {first_line}" if first_line else name
    return RankFault(
        status=status,
        message=message,
        at=time.time(),
        is_clause=isinstance(error, SystemExit) or status is not Status.FAILED,
        collateral=status is Status.FAILED and is_collateral(str(error)),
        phase=getattr(error, "phase", None) or phase,
        traceback="".join(traceback_module.format_exception(error)),
        log_path=log_path,
        remedy=error.remedy if isinstance(error, ZerotuneError) else None,
        error=_pickled(error) if isinstance(error, ZerotuneError) else None,
    )


def _pickled(error: ZerotuneError) -> bytes | None:
    """The error as bytes, if it comes back as what it was."""
    plain = error.with_traceback(None)
    plain.__cause__ = plain.__context__ = None
    try:
        data = pickle.dumps(plain)
        return data if isinstance(pickle.loads(data), ZerotuneError) else None
    except Exception:
        return None


def fault_of_exit(
    code: int, *, killed_for_memory: bool, phase: str | None, log_path: str | None
) -> RankFault:
    """What is told of a process that ended on its own: ``code`` as :mod:`subprocess` gives it, negative for a signal.

    An early exit is a failure, whatever its code.
    """
    status, remedy, collateral = Status.FAILED, None, False
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        message = f"was killed by {name}"
        if -code == signal.SIGKILL and killed_for_memory:
            status = Status.OOM_HOST
            message = "was killed by the kernel because the machine ran out of memory"
            remedy = "fewer ranks per node, a smaller model or micro-batch"
        elif -code == signal.SIGABRT and log_path:
            # A gloo thread that loses its peer can end the whole process in C++.
            collateral = is_collateral(tail(Path(log_path)))
    else:
        message = f"exited with code {code} before the run was over"
    return RankFault(
        status=status,
        message=message,
        at=time.time(),
        collateral=collateral,
        phase=phase,
        log_path=log_path,
        remedy=remedy,
    )


def first_cause(faults: list[RankFault]) -> RankFault:
    """The fault that the user should see: the earliest that is not the consequence of another.

    Args:
        faults: At least one.
    """
    return min(faults, key=lambda fault: (fault.collateral, fault.at))


def with_whereabouts(cause: RankFault, faults: list[RankFault]) -> RankFault:
    """The cause, with what its rank did last as the ranks that outlived it tell (an error's ``doing``, by rank)."""
    if cause.error is not None or cause.rank is None or cause.traceback is not None:
        return cause
    for fault in faults:
        with contextlib.suppress(Exception):
            doing = getattr(pickle.loads(fault.error or b""), "doing", {}).get(cause.rank)
            if doing:
                return replace(cause, message=f"{cause.message}; its last collective: {doing}")
    return cause


def failure_of(fault: RankFault, place: RankPlace | None) -> Failure:
    """The record of a fault, naming rank and node."""
    where = f"rank {place.rank} on {place.node_name}" if place else "a rank"
    joint = " " if fault.is_clause else ": "
    phase = f" during {fault.phase}" if fault.phase and fault.status is not Status.TIMEOUT else ""
    return Failure(
        status=fault.status,
        message=f"{where}{phase}{joint}{fault.message}",
        rank=place.rank if place else None,
        node=place.node_name if place else None,
        phase=fault.phase,
        traceback=fault.traceback,
        log_path=fault.log_path,
        remedy=fault.remedy,
    )


def named(fault: RankFault, rank: int) -> RankFault:
    return replace(fault, rank=rank)


def raise_fault(fault: RankFault, place: RankPlace | None) -> None:
    """Raise a fault as what it was on the rank, or as :class:`GroupFailed`.

    A :class:`ZerotuneError` keeps its type and exit code, and carries the record as ``error.failure``.

    Raises:
        ZerotuneError: What the rank raised.
        GroupFailed: In every other case.
    """
    failure = failure_of(fault, place)
    if fault.error is not None:
        try:
            error = pickle.loads(fault.error)
        except Exception:
            raise GroupFailed(failure) from None
        error.failure = failure
        raise error
    raise GroupFailed(failure)

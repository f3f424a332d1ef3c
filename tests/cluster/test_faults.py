from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from zerotune.cluster.faults import (
    GroupFailed,
    classify,
    failure_of,
    fault_of,
    fault_of_exit,
    first_cause,
    is_collateral,
    raise_fault,
)
from zerotune.cluster.messages import RankFault, RankPlace
from zerotune.config.errors import ConfigErrors, ExitCode, UsageError, ZerotuneError
from zerotune.records import Failure, Status

PLACE = RankPlace(1, 1, 0, "id", "host", "10.0.0.1", ())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Status.OOM_DEVICE),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            Status.OOM_DEVICE,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), Status.OOM_DEVICE),
        (MemoryError(), Status.OOM_HOST),
        (RuntimeError("shapes differ"), Status.FAILED),
        (ValueError("not enough memory of the past"), Status.FAILED),
    ],
)
def test_classify(error: BaseException, status: Status) -> None:
    assert classify(error) is status


def test_the_cause_comes_before_its_consequences() -> None:
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4242")
    consequence = fault_of(gloo, phase="train", log_path=None)
    assert consequence.collateral and is_collateral(str(gloo))
    cause = RankFault(Status.FAILED, "was killed by SIGKILL", at=consequence.at + 5.0, rank=1)
    assert first_cause([consequence, cause]) is cause
    earlier = RankFault(Status.FAILED, "ValueError: x", at=cause.at - 1.0, rank=2)
    assert first_cause([consequence, cause, earlier]) is earlier
    assert first_cause([consequence]) is consequence


def test_an_abort_after_a_lost_peer_is_a_consequence(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text(
        "terminate called after throwing an instance of 'gloo::IoException'\n  Connection reset by peer\n"
    )
    assert fault_of_exit(-6, killed_for_memory=False, phase=None, log_path=str(log)).collateral
    log.write_text("free(): invalid pointer\n")
    assert not fault_of_exit(-6, killed_for_memory=False, phase=None, log_path=str(log)).collateral


@pytest.mark.parametrize(
    ("code", "oom", "status", "message"),
    [
        (0, False, Status.FAILED, "rank 1 on host during step exited with code 0 before the run was over"),
        (3, False, Status.FAILED, "rank 1 on host during step exited with code 3 before the run was over"),
        (-9, False, Status.FAILED, "rank 1 on host during step was killed by SIGKILL"),
        (-11, True, Status.FAILED, "rank 1 on host during step was killed by SIGSEGV"),
        (
            -9,
            True,
            Status.OOM_HOST,
            "rank 1 on host during step was killed by the kernel because the machine ran out of memory",
        ),
    ],
)
def test_exits(code: int, oom: bool, status: Status, message: str) -> None:
    fault = fault_of_exit(code, killed_for_memory=oom, phase="step", log_path=None)
    failure = failure_of(fault, PLACE)
    assert (failure.status, failure.message, failure.rank, failure.node) == (status, message, 1, "host")


def test_an_error_can_name_its_phase() -> None:
    error = torch.OutOfMemoryError("tried to allocate 3 GiB")
    error.phase = "backward"  # type: ignore[attr-defined]
    failure = failure_of(fault_of(error, phase="train", log_path="x.log"), PLACE)
    assert failure.phase == "backward"
    assert (
        failure.message == "rank 1 on host during backward ran out of device memory: tried to allocate 3 GiB"
    )


class LocalError(ZerotuneError):
    """Its constructor takes other arguments than pickle gives it."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}", "neither")


@pytest.mark.parametrize("error", [UsageError("wrong", "mend"), ConfigErrors(["a", "b"])])
def test_errors_of_ours_keep_their_type(error: ZerotuneError) -> None:
    with pytest.raises(type(error)) as caught:
        raise_fault(fault_of(error, phase="setup", log_path=None), PLACE)
    assert caught.value.exit_code is ExitCode.USAGE
    assert str(caught.value) == str(error)
    assert caught.value.failure.rank == 1  # type: ignore[attr-defined]


def test_an_error_that_cannot_travel_is_still_told() -> None:
    with pytest.raises(GroupFailed, match="1 and 2") as caught:
        raise_fault(fault_of(LocalError(1, 2), phase="setup", log_path=None), PLACE)
    assert caught.value.failure.remedy == "neither"


def test_group_failed_survives_pickling() -> None:
    error = GroupFailed(Failure(status=Status.TIMEOUT, message="m", remedy="r"))
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, GroupFailed) and again.failure == error.failure and str(again) == "m (r)"

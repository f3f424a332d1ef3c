"""One local Ray, one group of two ranks, and everything that can happen to a run on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster_jobs
import psutil
import pytest

from zerotune.cluster import GroupFailed, Limits, WorkerGroup
from zerotune.cluster.join import Cluster
from zerotune.config.errors import ExitCode, UsageError
from zerotune.records import Status

pytestmark = [pytest.mark.ray, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> Iterator[WorkerGroup]:
    with WorkerGroup.start(cluster, threads_per_rank=1, run_env={"CLUSTER_TEST": "yes"}) as started:
        yield started


def fail(group: WorkerGroup, tmp_path: Path, limits: Limits | None = None, **arg: Any) -> GroupFailed:
    with pytest.raises(GroupFailed) as caught:
        group.run(cluster_jobs.trouble, arg, run_dir=str(tmp_path), limits=limits)
    assert not group.healthy
    return caught.value


def test_one_group_serves_many_runs(group: WorkerGroup, tmp_path: Path) -> None:
    seen: list[Any] = []
    first = group.run(
        cluster_jobs.facts, "x", run_dir=str(tmp_path), on_progress=lambda *told: seen.append(told)
    )
    second = group.run(cluster_jobs.facts, "y", run_dir=str(tmp_path / "second"))
    assert [result["pid"] for result in first] == [result["pid"] for result in second] == group.pids
    assert [result["sum"] for result in first] == [2.0, 2.0]
    assert [(result["rank"], result["local_rank"]) for result in first] == [(0, 0), (1, 1)]
    assert first[0]["threads"] == 1 and first[0]["omp"] == "1" and first[0]["device"] == "cpu"
    assert first[1]["environment"] == "yes" and second[1]["arg"] == "y"
    assert "ray" not in first[0]["modules"], "Ray's threads and memory would be measured with the run"
    log = (tmp_path / "logs" / "rank1.log").read_text()
    assert "printed by rank 1" in log and "rank 0" not in log
    assert "printed by rank 1" in (tmp_path / "second" / "logs" / "rank1.log").read_text()
    assert group.healthy


def test_progress_reaches_the_driver(group: WorkerGroup, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    steps = group.run(
        cluster_jobs.trouble,
        {"kind": "none", "steps": 40},
        run_dir=str(tmp_path),
        on_progress=lambda rank, progress: seen.append((rank, progress.step)),
    )
    assert steps == [39, 39]
    assert len([step for rank, step in seen if rank == 0]) >= 3
    assert [step for rank, step in seen if rank == 0] == sorted(step for rank, step in seen if rank == 0)


def test_an_exception_on_one_rank_ends_the_run(group: WorkerGroup, tmp_path: Path) -> None:
    old = list(group.pids)
    began = time.monotonic()
    failure = fail(group, tmp_path, kind="raise").failure
    assert time.monotonic() - began < 5.0, "the other rank waits in a collective and must not be waited for"
    assert (failure.status, failure.rank, failure.phase) == (Status.FAILED, 1, "train")
    assert failure.message == f"rank 1 on {group.places[1].node_name} during train: ValueError: boom"
    assert failure.traceback is not None and "_get_into_trouble" in failure.traceback
    assert failure.log_path is not None and "ValueError: boom" in Path(failure.log_path).read_text()
    assert not any(psutil.pid_exists(pid) for pid in old), "the old ranks are gone before anyone goes on"
    # The group is replaced, and works.
    results = group.run(cluster_jobs.facts, None, run_dir=str(tmp_path / "next"))
    assert [result["sum"] for result in results] == [2.0, 2.0]
    assert not set(old) & set(group.pids)


@pytest.mark.parametrize(
    ("kind", "rank", "status", "words"),
    [
        ("kill", 1, Status.FAILED, "was killed by SIGKILL"),
        ("segfault", 0, Status.FAILED, "was killed by SIGSEGV"),
        ("exit0", 1, Status.FAILED, "exited with code 0 before the run was over"),
        ("sysexit", 0, Status.FAILED, "called sys.exit(0) before the run was over"),
        ("oom", 1, Status.OOM_DEVICE, "ran out of device memory: tried to allocate 12.00 GiB"),
        ("allocator", 0, Status.OOM_DEVICE, "ran out of device memory"),
        ("memory", 1, Status.OOM_HOST, "ran out of host memory"),
        ("unpicklable", 1, Status.FAILED, "Local: cannot travel"),
    ],
)
def test_a_rank_in_trouble(
    group: WorkerGroup, tmp_path: Path, kind: str, rank: int, status: Status, words: str
) -> None:
    if not group.healthy:
        group.restart()
    began = time.monotonic()
    failure = fail(group, tmp_path, kind=kind, rank=rank).failure
    assert time.monotonic() - began < 12.0
    assert (failure.status, failure.rank) == (status, rank), failure
    assert words in failure.message and failure.message.startswith(
        f"rank {rank} on {group.places[rank].node_name}"
    )
    assert failure.log_path is not None


def test_a_users_mistake_keeps_its_type(group: WorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        group.run(cluster_jobs.trouble, {"kind": "usage"}, run_dir=str(tmp_path))
    assert caught.value.exit_code is ExitCode.USAGE
    assert (caught.value.message, caught.value.remedy) == ("the factory is wrong", "mend it")
    assert caught.value.failure.rank == 1  # type: ignore[attr-defined]
    assert not group.healthy


def test_a_result_that_cannot_be_pickled(group: WorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(GroupFailed, match=r"pickle|local object"):
        group.run(cluster_jobs.unpicklable_result, None, run_dir=str(tmp_path))


def test_a_stopped_rank_is_named(group: WorkerGroup, tmp_path: Path) -> None:
    if not group.healthy:
        group.restart()
    began = time.monotonic()
    failure = fail(group, tmp_path, limits=Limits(silence_s=2.0), kind="stop").failure
    assert time.monotonic() - began < 12.0
    assert (failure.status, failure.rank) == (Status.TIMEOUT, 1)
    assert "timed out in train: no progress for 2 s; the process is stopped (SIGSTOP)" in failure.message
    # The rank that can, has written what it was doing.
    assert "all_reduce" in (tmp_path / "logs" / "rank0.log").read_text()
    assert not any(psutil.pid_exists(pid) for pid in group.pids)


def test_a_silent_run_times_out(group: WorkerGroup, tmp_path: Path) -> None:
    failure = fail(group, tmp_path, limits=Limits(silence_s=1.5), kind="silent", rank=0).failure
    assert failure.status is Status.TIMEOUT
    assert "_get_into_trouble" in (tmp_path / "logs" / "rank0.log").read_text()


def test_the_whole_run_is_limited(group: WorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(GroupFailed, match="took longer than 1 s") as caught:
        group.run(cluster_jobs.wait_for_ever, None, run_dir=str(tmp_path), limits=Limits(total_s=1.0))
    assert caught.value.failure.status is Status.TIMEOUT


def test_replacing_the_ranks_again_and_again(group: WorkerGroup, tmp_path: Path) -> None:
    """Twenty groups back to back: no port is taken, no answer is lost, no process number comes back."""
    pids: set[int] = set()
    for _ in range(20):
        group.restart()
        pids.update(group.pids)
    assert len(pids) == 40
    assert [result["sum"] for result in group.run(cluster_jobs.facts, None, run_dir=str(tmp_path))] == [
        2.0,
        2.0,
    ]


def test_cancel_from_another_thread(group: WorkerGroup, tmp_path: Path) -> None:
    if not group.healthy:
        group.restart()
    cancel = threading.Event()
    threading.Timer(1.0, cancel.set).start()
    began = time.monotonic()
    with pytest.raises(GroupFailed) as caught:
        group.run(cluster_jobs.wait_for_ever, None, run_dir=str(tmp_path), cancel=cancel)
    assert caught.value.failure.status is Status.INTERRUPTED
    assert time.monotonic() - began < 5.0


def test_a_failing_callback_ends_the_ranks(group: WorkerGroup, tmp_path: Path) -> None:
    def broken(rank: int, progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.run(cluster_jobs.wait_for_ever, None, run_dir=str(tmp_path), on_progress=broken)
    assert not any(psutil.pid_exists(pid) for pid in group.pids)


def test_closing_gives_the_place_back(cluster: Cluster, tmp_path: Path) -> None:
    import ray

    from zerotune.cluster.supply import read_nodes

    def free() -> float:
        return sum(node.free_cpus for node in read_nodes())

    before = free()
    group = WorkerGroup.start(cluster)
    children = group.run(cluster_jobs.spawn_child, None, run_dir=str(tmp_path))
    pids = [*group.pids, *children]
    group.close()
    group.close()
    deadline = time.monotonic() + 10.0
    while free() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free() == before
    states = {entry["state"] for entry in ray.util.placement_group_table().values() if entry["name"]}
    assert len([s for s in states if s != "REMOVED"]) <= 1, "the module's own group at most"
    alive = [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]
    assert not alive

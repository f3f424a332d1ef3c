"""Sample records, for tests of whatever reads them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from zerotune.config.schema import JobConfig
from zerotune.records import (
    ByteClass,
    ByteSample,
    CollectiveEntry,
    CollectiveKind,
    Confirmed,
    Failure,
    Fingerprint,
    Interval,
    Ledger,
    Measurement,
    MemoryUse,
    RunKind,
    RunRecord,
    Status,
    StudyRecord,
)

MIB = 2**20
EPOCH = datetime(2030, 1, 1, tzinfo=UTC)


def make_config(micro_batch_size: int = 4, steps: int = 100, **knobs: Any) -> JobConfig:
    """A resolved configuration of a small GPT; ``knobs`` are those under ``zero:``."""
    zero = {
        "allgather_bucket_size": 790_000,
        "prefetch_distance": 790_000,
        "backward_prefetch_distance": 790_000,
        "param_persistence_threshold": 7_900,
        "reduce_bucket_size": 790_000,
    } | knobs
    return JobConfig.model_validate(
        {
            "model": {"gpt": {"layers": 4, "d_model": 256, "heads": 4}},
            "train": {"micro_batch_size": micro_batch_size, "global_batch_size": 8, "steps": steps},
            "zero": zero,
        }
    )


def make_workload(name: str = "gpt", **facts: Any) -> Fingerprint:
    """A workload; other names or facts give other keys."""
    return Fingerprint.of({"model": {name: {"layers": 4, "d_model": 256}}, "data": {"text": {}}} | facts)


def make_cluster(
    nodes: int = 1, ranks_per_node: int = 2, device: str = "cpu", link: str | None = None
) -> Fingerprint:
    """A cluster, by the facts that make up its key."""
    return Fingerprint.of(
        {"device": device, "ranks_per_node": ranks_per_node, "nodes": nodes, "link": link or "undeclared"}
    )


def make_measurement(
    tokens_per_second: float = 4000.0,
    spread: float = 0.01,
    peak_memory_bytes: int = 200 * MIB,
    ranks: int = 2,
    final_loss: float = 2.5,
) -> Measurement:
    """A measurement of ``spread`` relative half-width on every side, 1024 tokens a step."""
    step = 1024 / tokens_per_second
    return Measurement(
        step_time_s=Interval(value=step, low=step / (1 + spread), high=step * (1 + spread)),
        tokens_per_second=Interval(
            value=tokens_per_second,
            low=tokens_per_second / (1 + spread),
            high=tokens_per_second * (1 + spread),
        ),
        step_times_s=[step] * 10,
        tokens_per_step=1024.0,
        warmup_steps=3,
        stopped_because="interval",
        memory=[
            MemoryUse(
                peak=peak_memory_bytes - rank,
                peak_allocated=peak_memory_bytes - rank,
                at_rest=peak_memory_bytes // 2,
                resident_peak=peak_memory_bytes * 2,
                peak_live_elements=1_580_000,
            )
            for rank in range(ranks)
        ],
        final_loss=final_loss,
        startup_s=1.5,
        sent_elements_per_step=4_740_000,
        collectives_per_step=18,
    )


def make_run(
    run_id: str = "t-00000000",
    tokens_per_second: float | None = 4000.0,
    *,
    status: Status | None = None,
    peak_memory_bytes: int = 200 * MIB,
    spread: float = 0.01,
    config: JobConfig | None = None,
    number: int | None = None,
    **fields: Any,
) -> RunRecord:
    """A trial: complete with ``tokens_per_second``, or failed without.

    Args:
        run_id: Its id.
        tokens_per_second: ``None`` for a run without a measurement.
        status: Default: ``complete`` if measured, else ``oom_device``.
        peak_memory_bytes: Of its measurement.
        spread: Relative half-width of the intervals.
        config: Default: :func:`make_config`.
        number: ``trial_number``; also makes it that many minutes younger than :data:`EPOCH`.
        **fields: Anything else of :class:`RunRecord`.
    """
    measured = tokens_per_second is not None
    status = status or (Status.COMPLETE if measured else Status.OOM_DEVICE)
    defaults: dict[str, Any] = {
        "kind": RunKind.TRIAL,
        "workload": make_workload(),
        "cluster": make_cluster(),
        "created": EPOCH + timedelta(minutes=number or 0),
        "study": "demo",
        "trial_number": number,
        "versions": {"zerotune": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "steps_done": 13 if measured else 0,
    }
    if tokens_per_second is not None:
        defaults["measurement"] = make_measurement(tokens_per_second, spread, peak_memory_bytes)
    elif status.is_final:
        defaults["failure"] = make_failure(status)
    return RunRecord(run_id=run_id, status=status, config=config or make_config(), **(defaults | fields))


def make_failure(status: Status = Status.OOM_DEVICE) -> Failure:
    """A failure of rank 1 in backward."""
    return Failure(
        status=status,
        message="cannot allocate 512.0 MiB",
        rank=1,
        node="node0",
        phase="backward",
        traceback="Traceback (most recent call last):\n  ...\nRuntimeError: cannot allocate",
        log_path="logs/rank1.log",
        remedy="lower train.micro_batch_size",
    )


def make_confirmed(
    run_id: str, speedup: float = 1.0, spread: float = 0.04, *, rounds: int = 8, baseline: float = 4000.0
) -> Confirmed:
    """What was found in turns: ``spread`` relative half-width, 0 for the reference; ``baseline`` in tokens/s."""
    rate = make_measurement(baseline * speedup)
    return Confirmed(
        run_id=run_id,
        speedup=Interval(value=speedup, low=speedup / (1 + spread), high=speedup * (1 + spread)),
        rounds=rounds,
        is_reference=spread == 0,
        step_time_s=rate.step_time_s,
        tokens_per_second=rate.tokens_per_second,
    )


def make_study(name: str = "demo", **fields: Any) -> StudyRecord:
    """A study of :func:`make_workload` on :func:`make_cluster`."""
    defaults: dict[str, Any] = {
        "fingerprint": Fingerprint.of({"space": "default", "name": name}),
        "workload": make_workload(),
        "cluster": make_cluster(),
        "objective": "throughput",
        "trials_wanted": 12,
        "created": EPOCH,
    }
    return StudyRecord(name=name, **(defaults | fields))


def make_ledger(rank: int = 0, units: int = 3) -> Ledger:
    """A ledger of a step with one gather per unit and pass, and one reduction per unit."""
    purposes = [
        (CollectiveKind.ALL_GATHER, "forward"),
        (CollectiveKind.ALL_GATHER, "backward"),
        (CollectiveKind.REDUCE_SCATTER, "gradient"),
    ]
    collectives = [
        CollectiveEntry(
            sequence=index * units + unit,
            kind=kind,
            purpose=purpose,
            units=(f"blocks.{unit}",),
            elements=790_528,
            sent_bytes=790_528 * 2,
            issued_s=0.01 * (index * units + unit),
            waited_s=0.01 * (index * units + unit) + 0.004,
            done_s=0.01 * (index * units + unit) + 0.006,
        )
        for index, (kind, purpose) in enumerate(purposes)
        for unit in range(units)
    ]
    return Ledger(
        rank=rank,
        collectives=collectives,
        samples=[ByteSample(time_s=0.0, byte_class=ByteClass.FULL, bytes=790_528 * 4)],
        at_rest={ByteClass.SHARD: 8 * MIB, ByteClass.OPTIMIZER: 16 * MIB},
        peak={ByteClass.SHARD: 8 * MIB, ByteClass.OPTIMIZER: 16 * MIB, ByteClass.FULL: 6 * MIB},
        peak_live_elements=1_581_056,
    )

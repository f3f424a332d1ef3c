"""What was trained, and where, in one line."""

from __future__ import annotations

from zerotune.config.schema import JobConfig
from zerotune.records import Fingerprint, RunRecord
from zerotune.report import format


def headline(run: RunRecord) -> str:
    """``gpt 4 x 256 on text, global batch 8, fp32, adamw · 1 node x 2 ranks of cpu · workload 3f9a1c02``."""
    train = run.config.train
    what = f"{model_text(run.config)} on {data_text(run.config)}"
    how = f"global batch {train.global_batch_size}, {train.precision}, {train.optimizer.name.value}"
    return f"{what}, {how} · {cluster_text(run.cluster)} · workload {run.workload.key[:8]}"


def model_text(config: JobConfig) -> str:
    """The model by kind and size: ``gpt 4 x 256``, ``hf qwen2``, ``factory my.module:build``."""
    model = config.model
    if decoder := model.gpt or model.llama:
        return f"{'gpt' if model.gpt else 'llama'} {decoder.layers} x {decoder.d_model}"
    if model.hf:
        return f"hf {model.hf.folder or (model.hf.config or {}).get('model_type', 'inline')}"
    assert model.factory is not None, "the schema takes exactly one kind of model"
    return f"factory {model.factory.factory}"


def data_text(config: JobConfig) -> str:
    """The data by kind: ``text``, ``synthetic``, ``factory my.module:build``."""
    if config.data.factory:
        return f"factory {config.data.factory.factory}"
    return "synthetic" if config.data.synthetic else "text"


def cluster_text(cluster: Fingerprint) -> str:
    """``2 nodes x 8 ranks of H200, link ib``."""
    facts = cluster.facts
    nodes = format.count(int(facts.get("nodes", 1)), "node")
    ranks = format.count(int(facts.get("ranks_per_node", 1)), "rank")
    link = facts.get("link")
    suffix = f", link {link}" if link and link != "undeclared" else ""
    return f"{nodes} x {ranks} of {facts.get('device', 'unknown device')}{suffix}"


def provenance(run: RunRecord) -> list[str]:
    """Where a configuration comes from, as lines for the head of a file."""
    trial = (
        f", trial {run.trial_number} of study {run.study}"
        if run.study and run.trial_number is not None
        else ""
    )
    lines = [
        f"run {run.run_id}{trial}: {run.status.value}",
        headline(run),
        f"run on {run.created:%Y-%m-%d %H:%M} UTC",
    ]
    if run.measurement is not None:
        speed = format.number_interval(run.measurement.tokens_per_second)
        lines.append(
            f"measured: {speed} tokens/s, peak memory {format.memory(run.measurement.peak_memory_bytes)}"
        )
    if run.versions:
        lines.append("with " + ", ".join(f"{name} {version}" for name, version in run.versions.items()))
    return lines

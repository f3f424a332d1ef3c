"""The fingerprint of what is trained: runs with equal ones may be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerotune.config.errors import UsageError
from zerotune.config.schema import JobConfig, TrainConfig
from zerotune.models.factory import source_hash
from zerotune.records import Fingerprint

_TRAIN_FACTS = {"global_batch_size", "precision", "optimizer", "lr_schedule", "clip_norm"}

_OPTIONAL_FACTS: dict[str, Callable[[TrainConfig], bool]] = {
    "gradient_dtype": lambda train: train.precision != "fp32",
    "reduce_dtype": lambda train: train.precision != "fp32",
    "loss_scale": lambda train: train.precision == "fp16",
    "clip_norm_type": lambda train: train.clip_norm is not None,
}
"""Facts that count where they act and are not left at their default, so that a new one leaves old fingerprints alone."""


def workload_fingerprint(job: JobConfig) -> Fingerprint:
    """Fingerprint of the resolved model and data, and of ``train`` what decides what is learned.

    Knobs, the number of steps, the engine and the seed are not part of it. The source of a user's factory is, and so
    is the content of a transformers folder's ``config.json`` and of a tokenizer.

    Raises:
        UsageError: One of these files does not exist.
    """
    facts = {
        "model": job.model.model_dump(mode="json", exclude_none=True),
        "data": job.data.model_dump(mode="json", exclude_none=True),
        "train": job.train.model_dump(mode="json", include=_TRAIN_FACTS) | _optional_facts(job.train),
        "sources": _sources(job),
    }
    return Fingerprint.of(facts)


def _optional_facts(train: TrainConfig) -> dict[str, Any]:
    acting = {name for name, acts in _OPTIONAL_FACTS.items() if acts(train)}
    default = TrainConfig()
    return {
        name: value
        for name, value in train.model_dump(mode="json", include=acting).items()
        if getattr(train, name) != getattr(default, name)
    }


def _sources(job: JobConfig) -> dict[str, str]:
    """SHA-256 of the files that the configuration only names."""
    sources = {}
    if job.model.factory is not None:
        sources["model.factory"] = source_hash(job.model.factory.factory)
    if job.data.factory is not None:
        sources["data.factory"] = source_hash(job.data.factory.factory)
    if job.model.hf is not None and job.model.hf.folder is not None:
        path = Path(job.model.hf.folder).expanduser() / "config.json"
        sources["model.hf.folder"] = _file_hash("model.hf.folder", path)
    if job.data.text is not None and job.data.text.tokenizer is not None:
        sources["data.text.tokenizer"] = _file_hash(
            "data.text.tokenizer", Path(job.data.text.tokenizer).expanduser()
        )
    return sources


def _file_hash(key: str, path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{key}: cannot read {path}: {error.strerror}") from None

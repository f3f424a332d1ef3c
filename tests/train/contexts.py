"""A rank's surroundings without a cluster, and small jobs to run in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zerotune.config.schema import JobConfig
from zerotune.train.context import Progress
from zerotune.train.spec import RunSpec

TINY_GPT = {"gpt": {"layers": 2, "d_model": 16, "heads": 2, "vocab_size": 256, "sequence_length": 16}}


@dataclass
class FakeContext:
    """Collects what is reported."""

    run_dir: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: str = "here"
    device: str = "cpu"
    reports: list[Progress] = field(default_factory=list)

    def report(self, progress: Progress) -> None:
        self.reports.append(progress)

    @property
    def phases(self) -> list[str]:
        """Phases in the order they began."""
        return list(dict.fromkeys(report.phase for report in self.reports))


def make_job(model: dict[str, Any] = TINY_GPT, data: dict[str, Any] | None = None, **train: Any) -> JobConfig:
    """A job that takes milliseconds a step."""
    return JobConfig.model_validate(
        {"model": model, "data": data or {"synthetic": {}}, "train": {"global_batch_size": 4, **train}}
    )


def make_spec(job: JobConfig, mode: str = "measure", **fields: Any) -> RunSpec:
    return RunSpec.model_validate({"job": job, "mode": mode, "run_dir": "", **fields})

"""An engine without any partitioning, on one process: the protocol's simplest implementation.

With the whole global batch as one micro-batch it is the plain PyTorch loop that other engines are held against.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zerotune.config.knobs import Knobs
from zerotune.config.schema import JobConfig
from zerotune.engine.group import RankGroup
from zerotune.engine.protocol import StepResult
from zerotune.models.deferred import fill
from zerotune.records import ByteClass, Ledger
from zerotune.train.optim import optimizer_factory

RESOLVED = Knobs(
    stage=0,
    allgather_bucket_size=0,
    prefetch_distance=0,
    backward_prefetch_distance=0,
    param_persistence_threshold=0,
    reduce_bucket_size=0,
)


class PlainEngine:
    """Plain PyTorch behind the engine protocol.

    Args:
        model: Trained in place.
        optimizer: From parameter groups to an optimizer.
        clip_norm: Largest global gradient norm, or ``None``.
    """

    def __init__(self, model: nn.Module, optimizer: Any, clip_norm: float | None = None) -> None:
        self.module = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer([{"params": self.parameters}])
        self.clip_norm = clip_norm
        self.knobs = RESOLVED
        self.peak_live_elements = sum(p.numel() for p in self.parameters)
        self.loss_sum = self.weight_sum = 0.0
        self.closed = self.recording = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        (loss * weight).backward()
        self.loss_sum += loss.item() * weight
        self.weight_sum += weight

    def step(self) -> StepResult:
        weight = self.weight_sum
        for parameter in self.parameters:
            if parameter.grad is not None and weight:
                parameter.grad /= weight
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip_norm or float("inf")).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = self.loss_sum / weight if weight else 0.0
        self.loss_sum = self.weight_sum = 0.0
        return StepResult(loss, weight, norm)

    def flush(self) -> None:
        pass

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def at_rest(self) -> dict[ByteClass, int]:
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return {
            ByteClass.SHARD: sum(p.nbytes for p in self.parameters),
            ByteClass.OPTIMIZER: sum(t.nbytes for t in state),
        }

    def begin_ledger(self) -> None:
        self.recording = True

    def end_ledger(self) -> Ledger:
        self.recording = False
        at_rest = self.at_rest()
        return Ledger(rank=0, collectives=[], samples=[], at_rest=at_rest, peak=at_rest, peak_live_elements=0)

    def close(self) -> None:
        self.closed = True


def make_plain_engine(
    job: JobConfig, model: nn.Module, group: RankGroup, weights: str | None = None
) -> PlainEngine:
    """Stands in for :func:`zerotune.train.engines.make_engine`."""
    assert weights is None
    fill(model)
    return PlainEngine(model, optimizer_factory(job.train.optimizer), job.train.clip_norm)

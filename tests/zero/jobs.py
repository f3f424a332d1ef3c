"""What the ranks run in the engine's tests, and the plain loop they are held against."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zerotune.config.knobs import Knobs
from zerotune.config.schema import GptConfig, LlamaConfig
from zerotune.models.gpt import Gpt
from zerotune.models.llama import Llama

VOCABULARY = 61
LENGTH = 12
BATCH = 12


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        model: Name of a model in :data:`MODELS`.
        optimizer: ``sgd`` or ``adamw``.
        clip: Largest gradient norm; half of what is typical, so that it bites.
        accumulation: Micro-batches per step.
        knobs: As ``Knobs`` takes them.
        steps: Optimizer steps.
        precision: ``fp32`` or ``bf16``.
    """

    model: str = "gpt"
    optimizer: str = "sgd"
    clip: float | None = None
    accumulation: int = 1
    knobs: dict[str, Any] = field(default_factory=dict)
    steps: int = 50
    precision: str = "fp32"


@dataclass
class Outcome:
    """What came of it: the same fields for an engine and for the plain loop."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    gathers: int = 0
    broadcasts_in_steps: int = 0
    live_after_flush: int = 0


def gpt() -> nn.Module:
    return Gpt(GptConfig(layers=3, d_model=20, heads=2, vocab_size=VOCABULARY, sequence_length=LENGTH))


def tied_gpt() -> nn.Module:
    return Gpt(
        GptConfig(
            layers=2, d_model=20, heads=2, vocab_size=VOCABULARY, sequence_length=LENGTH, tie_embeddings=True
        )
    )


def llama() -> nn.Module:
    return Llama(
        LlamaConfig(
            layers=2, d_model=24, heads=3, kv_heads=1, d_ff=40, vocab_size=VOCABULARY, sequence_length=LENGTH
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": gpt, "tied_gpt": tied_gpt, "llama": llama}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def make_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.02)
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1, fused=True)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step, learnable: the next token is a function of the last."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (start + 7 * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))


def micro_batches(
    rank: int, size: int, accumulation: int, step: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of the global batch, micro-batch by micro-batch."""
    x, y = batch(step)
    share = BATCH // (size * accumulation)
    for number in range(accumulation):
        start = (number * size + rank) * share
        yield x[start : start + share], y[start : start + share]


def train_engine(rank: int, size: int, case: Case) -> Outcome:
    """Train with the ZeRO engine; for :func:`tests.ranks.run_on_ranks`."""
    import zerotune

    model = make_model(case.model)
    optimizer = make_optimizer(case.optimizer, model.parameters())
    engine = zerotune.ZeroEngine(
        model, optimizer, Knobs(**case.knobs), precision=case.precision, clip_norm=case.clip
    )
    before = engine.ledger.broadcasts
    losses, norms = [], []
    gathers = 0
    for step in range(case.steps):
        is_last = step == case.steps - 1
        if is_last:
            engine.begin_ledger()
        for x, y in micro_batches(rank, size, case.accumulation, step):
            engine.backward(mean_loss(engine(x), y))
        result = engine.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if is_last:
            ledger = engine.end_ledger()
            gathers = sum(e.purpose in ("forward", "backward") for e in ledger.collectives)
    state = engine.full_state_dict()
    broadcasts = engine.ledger.broadcasts - before
    engine.flush()
    live = engine.ledger.live_elements
    engine.close()
    return Outcome(losses, norms, state, gathers, broadcasts, live)


_PLAIN: dict[Any, Outcome] = {}


def train_plain(case: Case) -> Outcome:
    """Train one plain process on the concatenated batch: the oracle."""
    key = (case.model, case.optimizer, case.clip, case.steps)
    if key in _PLAIN:
        return _PLAIN[key]
    torch.set_num_threads(1)
    model = make_model(case.model)
    optimizer = make_optimizer(case.optimizer, model.parameters())
    losses, norms = [], []
    for step in range(case.steps):
        x, y = batch(step)
        loss = mean_loss(model(x), y)
        loss.backward()
        limit = float("inf") if case.clip is None else case.clip
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    outcome = Outcome(losses, norms, {k: v.detach().clone() for k, v in model.state_dict().items()})
    _PLAIN[key] = outcome
    return outcome


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest absolute difference between two states, and where it is."""
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).abs().max().item(), name) for name in one)


def combinations() -> list[tuple[str, float | None, int]]:
    """Every optimizer, with and without clipping and accumulation."""
    return list(itertools.product(("sgd", "adamw"), (None, 0.5), (1, 2)))

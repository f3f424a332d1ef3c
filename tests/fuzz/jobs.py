"""One example of the fuzz test: what the ranks run, the plain process it is held against, and the check."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.fuzz.modules import INPUTS, LENGTH, Model, build, loss_terms
from tests.ranks import run_on_ranks
from zerotune.config.knobs import Knobs
from zerotune.records import ByteClass
from zerotune.schedule import Gather

STEPS = 3
BATCH = 24
LEARNING_RATE = 0.1

TOLERANCE = 1e-5
"""Absolute, on losses, parameters and (relative to norms above 1) gradient norms, all of which are of the order of 1.

The engine and the plain process add the same numbers in another order: rounding gives some 1e-7 a sum, and three steps
through a few bounded layers (tanh between them, norms with an eps of 0.1) make at most some 1e-6 of it. The smallest
mistake, one wrong element in one gradient, moves a parameter by the learning rate times that gradient, 1e-4 and more.
"""


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        model: What is trained.
        ranks: N.
        accumulation: Micro-batches per step; they need not be of one size.
        accumulate: ``reduce`` or ``local``.
        clip: Largest gradient norm.
        weight_decay: Shows whether a parameter without a gradient is left alone.
        two_losses: Two backward passes through one graph.
        evaluate_before: Steps before which the model is evaluated without gradients.
        teacher: A pass without gradients between forward and backward.
        siamese: Two forwards before one backward.
        abandons: A forward with gradients and no backward, before the last step.
        reloads: The state is read out and loaded again before step 1.
        groups: Two parameter groups with settings of their own.
        thaws: Before steps 1 and 2 every ``thaws``-th parameter of the body is frozen, or thawed; 0 for none.
        knobs: As ``Knobs`` takes them.
    """

    model: Model
    ranks: int = 2
    accumulation: int = 1
    accumulate: str = "reduce"
    clip: float | None = None
    weight_decay: float = 0.0
    two_losses: bool = False
    evaluate_before: tuple[int, ...] = ()
    teacher: bool = False
    siamese: bool = False
    abandons: bool = False
    reloads: bool = False
    groups: bool = False
    thaws: int = 0
    knobs: tuple[tuple[str, Any], ...] = ()


@dataclass
class Outcome:
    """What a rank, or the plain process, saw. ``error`` is a traceback; ``wrong`` names broken promises."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    collectives: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    error: str = ""


@functools.lru_cache(maxsize=1)
def _data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(STEPS, BATCH, LENGTH, INPUTS, generator=generator)
    tokens = torch.randint(0, 10**6, (STEPS, BATCH, LENGTH), generator=generator)
    y = torch.randn(STEPS, BATCH, LENGTH, 64, generator=generator)
    return x, tokens, y


def _batch(model: Model, step: int, rows: slice) -> tuple[dict[str, Any], torch.Tensor]:
    x, tokens, y = (tensor[step, rows] for tensor in _data())
    return {"x": x, "more": [tokens % model.vocabulary]}, y


def _shares(case: Case) -> list[list[slice]]:
    """Rows of each micro-batch and rank: uneven where they do not divide the batch."""
    bounds = [
        BATCH * i // (case.ranks * case.accumulation) for i in range(case.ranks * case.accumulation + 1)
    ]
    rows = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    return [rows[i * case.ranks : (i + 1) * case.ranks] for i in range(case.accumulation)]


def _optimizer(module: torch.nn.Module, case: Case) -> torch.optim.Optimizer:
    params = list(module.parameters())
    if not case.groups or len(params) < 2:
        return torch.optim.SGD(params, lr=LEARNING_RATE, weight_decay=case.weight_decay)
    second = {"params": params[1::2], "lr": LEARNING_RATE / 2, "weight_decay": 0.05}
    return torch.optim.SGD(
        [{"params": params[::2]}, second], lr=LEARNING_RATE, weight_decay=case.weight_decay
    )


def _thaw(module: Any, case: Case, step: int) -> None:
    """Freeze what trains and thaw what is frozen."""
    if case.thaws and step:
        for param in list(module.body.parameters())[step - 1 :: case.thaws]:
            param.requires_grad_(not param.requires_grad)


def _losses(case: Case, model: Any, batch: Any, y: torch.Tensor) -> list[torch.Tensor]:
    """One or two terms that each have a gradient."""
    first, second = loss_terms(case.model, model(batch), y)
    if case.siamese:
        other = loss_terms(case.model, model(batch | {"x": batch["x"].flip(-1)}), y)
        first, second = first + other[0], second + other[1]
    return [first, second] if case.two_losses and second.requires_grad else [first + second]


def train_plain(case: Case) -> Outcome:
    """The oracle: one plain process, no recomputation, the ranks' batches concatenated."""
    torch.set_num_threads(1)
    outcome = Outcome()
    module, clock = build(case.model, checkpointing=False)
    optimizer = _optimizer(module, case)
    for step in range(STEPS):
        clock.step = step
        _thaw(module, case, step)
        if step in case.evaluate_before:
            outcome.evaluations.append(_evaluate(module, clock, case, step))
        total = 0.0
        for micro, shares in enumerate(_shares(case)):
            clock.micro = micro
            rows = slice(shares[0].start, shares[-1].stop)
            batch, y = _batch(case.model, step, rows)
            clock.tokens = batch["more"][0]
            loss = sum(_losses(case, module, batch, y)) * ((rows.stop - rows.start) / BATCH)
            loss.backward()
            total += loss.item()
        outcome.losses.append(total)
        limit = math.inf if case.clip is None else case.clip
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad()
    outcome.state = {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}
    return outcome


@torch.no_grad()
def _evaluate(model: Any, clock: Any, case: Case, step: int) -> float:
    model.eval()
    batch, y = _batch(case.model, step, slice(0, BATCH))
    clock.tokens = batch["more"][0]
    error, size = loss_terms(case.model, model(batch), y)
    model.train()
    return float(error + size)


def train_engine(rank: int, size: int, case: Case, mutation: str | None = None) -> Outcome:
    """Train on this rank; what goes wrong is in the answer, so that a failing example does not cost the pool."""
    from tests.fuzz.mutations import MUTATIONS

    context: AbstractContextManager[object] = MUTATIONS[mutation](rank, size) if mutation else nullcontext()
    outcome = Outcome()
    with context, contextlib.ExitStack() as stack:
        try:
            _train(rank, case, outcome, stack)
        except Exception:
            outcome.error = traceback.format_exc()
    return outcome


def _train(rank: int, case: Case, outcome: Outcome, stack: contextlib.ExitStack) -> None:
    import zerotune

    module, clock = build(case.model)
    engine = zerotune.ZeroEngine(
        module,
        _optimizer(module, case),
        Knobs(**dict(case.knobs)),
        clip_norm=case.clip,
        accumulate=case.accumulate,  # type: ignore[arg-type]
    )
    stack.callback(engine.close)
    broadcasts = engine.ledger.broadcasts
    persistent = engine.layout.persistent_units
    promises = _Promises(engine, module, outcome.wrong)
    engine.begin_ledger()
    for step in range(STEPS):
        clock.step = step
        _thaw(module, case, step)
        if step in case.evaluate_before:
            outcome.evaluations.append(_evaluate(engine, clock, case, step))
            promises.nothing_is_live(f"after the evaluation before step {step}")
        if case.reloads and step == 1:
            engine.load_state_dict(engine.state_dict())
        for micro, shares in enumerate(_shares(case)):
            clock.micro = micro
            rows = shares[rank]
            batch, y = _batch(case.model, step, rows)
            clock.tokens = batch["more"][0]
            if case.abandons and step == STEPS - 1 and micro == 0:
                engine(batch)
            losses = _losses(case, engine, batch, y)
            if case.teacher:
                with torch.no_grad():
                    engine(batch)
            for number, loss in enumerate(losses):
                is_last = number == len(losses) - 1
                engine.backward(loss, rows.stop - rows.start, retain_graph=not is_last, same_items=number > 0)
        result = engine.step()
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
        promises.nothing_is_live(f"after step {step}", but=engine.next_opening)
        promises.no_full_gradient(f"after step {step}")
    ledger = engine.end_ledger()
    outcome.collectives = [
        f"{e.kind}|{e.purpose}|{','.join(e.units)}|{e.elements}" for e in ledger.collectives
    ]
    if engine.ledger.broadcasts != broadcasts:
        outcome.wrong.append("a broadcast after set-up")
    promises.traces_are_balanced()
    if engine.layout.persistent_units != persistent:
        outcome.wrong.append("a unit became persistent that the threshold does not make so")
    if is_chain(case):
        promises.chain_is_lean(ledger.peak_live_elements)
    gathers = sum(e.purpose in ("forward", "backward") for e in ledger.collectives)
    if (
        case.ranks > 1
        and engine.knobs.stage == 3
        and engine.knobs.param_persistence_threshold == 0
        and not gathers
    ):
        outcome.wrong.append("nothing was gathered")
    outcome.state = {name: value.numpy() for name, value in engine.full_state_dict().items()}
    engine.flush()
    promises.nothing_is_live("after flush")
    if engine.at_rest()[ByteClass.POOLED]:
        outcome.wrong.append("pools are not empty after flush")


class _Promises:
    """What holds whatever the numbers are."""

    def __init__(self, engine: Any, module: torch.nn.Module, wrong: list[str]) -> None:
        self._engine = engine
        self._module = module
        self._wrong = wrong
        self._full = engine.at_rest()[ByteClass.FULL]

    def nothing_is_live(self, when: str, but: Sequence[Gather] = ()) -> None:
        engine = self._engine
        declared = sum(engine.layout.padded(unit) for gather in but for unit in gather.units)
        if engine.ledger.live_elements != declared:
            self._wrong.append(f"{engine.ledger.live_elements} elements are live {when}, not {declared}")
        full = [
            p.name
            for p in engine.shards.params
            if not p.persistent
            and p.param.untyped_storage().nbytes()
            and p.numel
            and p.param.untyped_storage().data_ptr()
            != p.shard.untyped_storage().data_ptr()  # of a rank alone
        ]
        if full:
            self._wrong.append(f"{full} are full {when}")
        if not declared and engine.at_rest()[ByteClass.FULL] != self._full:
            self._wrong.append(f"{engine.at_rest()[ByteClass.FULL]} bytes are full {when}, not {self._full}")

    def no_full_gradient(self, when: str) -> None:
        left = [name for name, param in self._module.named_parameters() if param.grad is not None]
        if left:
            self._wrong.append(f"{left} have full gradients {when}")
        flat = sum(grads.nbytes for grads in self._engine.shards.flat_grads)
        if self._engine.at_rest()[ByteClass.GRADIENT] != flat:
            self._wrong.append(f"gradient bytes are {self._engine.at_rest()[ByteClass.GRADIENT]} {when}")

    def traces_are_balanced(self) -> None:
        for schedule in self._engine.schedules:
            open_uses: dict[Any, int] = {}
            for event in schedule.trace.events:
                key = (event.phase, event.scope, event.units)
                open_uses[key] = open_uses.get(key, 0) + (1 if event.kind == "enter" else -1)
            if any(open_uses.values()):
                self._wrong.append("a use has no end in the recorded order")

    def chain_is_lean(self, peak: int) -> None:
        layout = self._engine.layout
        largest = max(layout.padded(unit) for unit in range(len(layout.units)))
        if peak > 2 * largest:
            self._wrong.append(
                f"{peak} elements were live; the largest unit and its buffer are {2 * largest}"
            )


_PLAIN_LEAVES = {"linear", "mlp", "norm", "conv", "scale", "vector"}


def is_chain(case: Case) -> bool:
    """Whether one unit and its buffer are all that may be live: units one after the other, on demand, dropped after use."""
    knobs = {"stage": 3, "release": "after_use"} | dict(case.knobs)
    body = case.model.body
    return (
        body.kind in ("sequential", "list")
        and all(child.kind in _PLAIN_LEAVES for child in body.children)
        and not (case.model.tied_head or case.two_losses or case.teacher or case.siamese or case.abandons)
        and (knobs["stage"], knobs["release"], knobs.get("prefetch_distance")) == (3, "after_use", 0)
    )


def _warm(rank: int, size: int) -> None:
    """Import what a case needs."""
    import tests.fuzz.mutations  # noqa: F401


@functools.lru_cache(maxsize=256)
def _plain(case: Case) -> Outcome:
    return train_plain(case)


def check(case: Case, mutation: str | None = None) -> None:
    """Train a case on its ranks and hold it against the plain process.

    Raises:
        AssertionError: It differs, broke a promise, or died.
    """
    plain = _plain(case)
    run_on_ranks(case.ranks, _warm, limit=600)  # starting ranks on a busy machine is no hang of theirs
    outcomes = run_on_ranks(case.ranks, train_engine, case, mutation, limit=150)
    problems = [line for rank, outcome in enumerate(outcomes) for line in _problems(rank, outcome, plain)]
    for rank, outcome in enumerate(outcomes):
        if outcome.collectives != outcomes[0].collectives:
            problems.append(f"rank {rank} issued other collectives than rank 0")
    assert not problems, "\n".join(problems[:12])


def _problems(rank: int, outcome: Outcome, plain: Outcome) -> Iterator[str]:
    if outcome.error:
        yield f"rank {rank} raised\n{outcome.error}"
        return
    for what in ("losses", "norms", "evaluations"):
        for index, (seen, wanted) in enumerate(
            zip(getattr(outcome, what), getattr(plain, what), strict=True)
        ):
            if not abs(seen - wanted) <= TOLERANCE * max(1.0, abs(wanted)):
                yield f"rank {rank}: {what}[{index}] is {seen}, not {wanted}"
    if outcome.state.keys() != plain.state.keys():
        yield f"rank {rank}: the state has other names: {outcome.state.keys() ^ plain.state.keys()}"
        return
    for name, wanted in plain.state.items():
        seen = outcome.state[name]
        if seen.shape != wanted.shape:
            yield f"rank {rank}: {name} has shape {seen.shape}, not {wanted.shape}"
        elif wanted.size and not np.abs(seen - wanted).max() <= TOLERANCE:
            yield f"rank {rank}: {name} differs by {np.abs(seen - wanted).max()}"
    yield from (f"rank {rank}: {what}" for what in outcome.wrong)

"""The same script, run by plain PyTorch and by the engine, must give the same numbers.

A scenario is a module-level function that takes a :class:`World`, builds one or more models through it and trains them.
The oracle runs it in this process on whole batches; the ranks run it with the engine, each on its share. What is compared:
the parameters and buffers at the end, every loss and gradient norm, and every value that the script notes.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_on_ranks
from zerotune.config.errors import ZerotuneError

BATCH = 12
LIMIT_S = 60.0


@dataclass(frozen=True)
class Setting:
    """How the engine runs a scenario.

    Attributes:
        ranks: World size.
        knobs: As ``Knobs`` takes them.
        accumulate: As the engine takes it.
        precision: As the engine takes it.
        options: For the scenario: what it varies.
    """

    ranks: int = 2
    knobs: dict[str, Any] = field(default_factory=lambda: {"param_persistence_threshold": 0})
    accumulate: str = "reduce"
    precision: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def must_gather(self) -> bool:
        return (
            self.ranks > 1
            and self.knobs.get("stage", 3) == 3
            and self.knobs.get("param_persistence_threshold") == 0
        )


ONE = Setting(1)
TWO = Setting(2, {"param_persistence_threshold": 0, "release": "keep", "prefetch_distance": 10**6})
THREE = Setting(3, {"param_persistence_threshold": 0, "prefetch_distance": 0}, accumulate="local")
USUAL = (ONE, TWO, THREE)


@dataclass
class Record:
    """What came of a scenario."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    gathers: int = 0


class World:
    """What a scenario sees: its share of batches, models to train, and a place to note values."""

    def __init__(self, rank: int, size: int, setting: Setting | None) -> None:
        self.rank = rank
        self.size = size
        self.setting = setting
        self.options = setting.options if setting else {}
        self.record = Record()
        self.models: list[Model] = []

    @property
    def is_plain(self) -> bool:
        return self.setting is None

    def build(
        self,
        module: nn.Module,
        lr: float = 0.1,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        clip: float | None = None,
        **engine: Any,
    ) -> Model:
        """Take over a module; SGD without momentum unless said otherwise."""
        made = optimizer(module) if optimizer else torch.optim.SGD(module.parameters(), lr=lr)
        model = (Plain if self.is_plain else Zero)(self, module, made, clip, **engine)
        self.models.append(model)
        return model

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a global batch."""
        rows = tensor.shape[0] // self.size
        return tensor[self.rank * rows : (self.rank + 1) * rows].clone()

    def note(self, value: torch.Tensor | float) -> None:
        """Note a number that is the same on every rank and in the plain run."""
        self.record.values.append(float(value))

    def note_mean(self, value: torch.Tensor | float) -> None:
        """Note the mean over ranks of a number."""
        value = float(value)
        if self.size > 1:
            total = torch.tensor(value, dtype=torch.float64)
            torch.distributed.all_reduce(total)
            value = float(total) / self.size
        self.record.values.append(value)


class Model(abc.ABC):
    """A model under training, plain or by the engine."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor, weight: float = 1.0, **options: Any) -> None: ...

    @abc.abstractmethod
    def step(self) -> None: ...

    @abc.abstractmethod
    def state(self) -> dict[str, torch.Tensor]: ...

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Plain(Model):
    """The oracle: one process, gradients divided by the window's weight."""

    def __init__(
        self,
        world: World,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        **engine: Any,
    ) -> None:
        self.world, self.module, self.optimizer, self.clip = world, module, optimizer, clip
        self._loss, self._weight = 0.0, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, weight: float = 1.0, **options: Any) -> None:
        same_items = options.pop("same_items", False)
        (loss * weight).backward(**options)
        self._loss += float(loss.detach()) * weight
        self._weight += 0 if same_items else weight

    def step(self) -> None:
        params = [p for p in self.module.parameters() if p.grad is not None]
        for param in params:
            param.grad /= self._weight
        limit = float("inf") if self.clip is None else self.clip
        self.world.record.norms.append(float(nn.utils.clip_grad_norm_(params, limit)))
        self.world.record.losses.append(self._loss / self._weight)
        self.optimizer.step()
        for param in self.module.parameters():
            param.grad = None
        self._loss, self._weight = 0.0, 0.0

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}


class Zero(Model):
    """The engine, watched: after every step nothing may be left of the full parameters."""

    def __init__(
        self,
        world: World,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        **engine: Any,
    ) -> None:
        import zerotune

        assert world.setting is not None
        setting = world.setting
        self.world, self.module, self.optimizer = world, module, optimizer
        self.engine = zerotune.ZeroEngine(
            module,
            optimizer,
            zerotune.Knobs(**setting.knobs),
            precision=setting.precision,  # type: ignore[arg-type]
            clip_norm=clip,
            accumulate=setting.accumulate,  # type: ignore[arg-type]
            **engine,
        )
        self.engine.begin_ledger()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, weight: float = 1.0, **options: Any) -> None:
        self.engine.backward(loss, weight, **options)

    def step(self) -> None:
        result = self.engine.step()
        self.world.record.losses.append(result.loss)
        self.world.record.norms.append(result.grad_norm)
        opening = [unit for gather in self.engine.next_opening for unit in gather.units]
        self.assert_nothing_is_live(
            "after step()", allowed=sum(self.engine.layout.padded(unit) for unit in opening)
        )

    def assert_nothing_is_live(self, when: str, allowed: int = 0) -> None:
        """But what the next step declares to need first, which is in flight: no full parameter has its storage."""
        live = self.engine.ledger.live_elements
        assert live in (0, allowed), f"{live} live {when}"
        for param in self.engine.shards.params:
            storage = param.rows.untyped_storage()
            assert param.persistent or storage.nbytes() == 0, (
                f"{param.name} still holds {storage.nbytes()} bytes {when}"
            )

    def state(self) -> dict[str, torch.Tensor]:
        return self.engine.full_state_dict()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.gathered()

    def finish(self) -> int:
        """Flush and close; returns the number of gathers."""
        from zerotune.records import ByteClass

        ledger = self.engine.end_ledger()
        self.engine.flush()
        self.assert_nothing_is_live("after flush()")
        assert self.engine.at_rest()[ByteClass.POOLED] == 0
        self.engine.close()
        return sum(entry.purpose in ("forward", "backward", "access") for entry in ledger.collectives)


Scenario = Callable[[World], None]


def run_plain(scenario: Scenario, options: dict[str, Any] | None = None) -> Record:
    """The oracle, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = World(0, 1, None)
    world.options = options or {}
    scenario(world)
    world.record.states = [model.state() for model in world.models]
    return world.record


def run_engine(rank: int, size: int, scenario: Scenario, setting: Setting) -> Record:
    """One rank of a scenario; for :func:`tests.ranks.run_on_ranks`."""
    world = World(rank, size, setting)
    try:
        scenario(world)
        for model in world.models:
            world.record.states.append(model.state())
            assert isinstance(model, Zero)
            world.record.gathers += model.finish()
    finally:
        _put_back_default_state()
    return world.record


def run_refused(rank: int, size: int, scenario: Scenario, setting: Setting) -> str:
    """One rank of a scenario that must end in an error for the user; returns its text."""
    try:
        scenario(World(rank, size, setting))
    except ZerotuneError as error:
        return str(error)
    finally:
        _put_back_default_state()
    return "(nothing was refused)"


def _put_back_default_state() -> None:
    torch.set_grad_enabled(True)


def assert_parity(
    scenario: Scenario,
    settings: tuple[Setting, ...] | list[Setting] = USUAL,
    tolerance: float = 2e-5,
    states_too: bool = True,
) -> None:
    """Run a scenario under every setting and hold it against the plain run."""
    plain: dict[str, Record] = {}
    for setting in settings:
        key = repr(sorted(setting.options.items()))
        if key not in plain:
            plain[key] = run_plain(scenario, setting.options)
        outcomes = run_on_ranks(setting.ranks, run_engine, scenario, setting, limit=LIMIT_S)
        for rank, outcome in enumerate(outcomes):
            with _named(f"{setting}, rank {rank}"):
                compare(outcome, plain[key], tolerance, states_too)
                if setting.must_gather:
                    assert outcome.gathers > 0, "nothing was gathered: the engine did not partition"


def compare(outcome: Record, plain: Record, tolerance: float, states_too: bool = True) -> None:
    """Assert that two records agree."""
    assert outcome.losses == pytest.approx(plain.losses, abs=tolerance, rel=tolerance)
    assert outcome.norms == pytest.approx(plain.norms, abs=tolerance, rel=10 * tolerance)
    assert outcome.values == pytest.approx(plain.values, abs=tolerance, rel=10 * tolerance)
    if not states_too:
        return
    for mine, theirs in zip(outcome.states, plain.states, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name].shape == value.shape, name
            if value.numel():
                difference = (mine[name].double() - value.double()).abs().max().item()
                assert difference < tolerance, f"{name} differs by {difference}"


def assert_refused(scenario: Scenario, *words: str, setting: Setting = TWO) -> None:
    """Every rank must end in a :class:`ZerotuneError` whose text has all the words."""
    for text in run_on_ranks(setting.ranks, run_refused, scenario, setting, limit=LIMIT_S):
        for word in words:
            assert word in text, text


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


# ------------------------------------------------------------------------------------- batches and parts of models

WIDTH = 12
VOCABULARY = 30


def vectors(step: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a global batch: 12 rows of ``shape`` (default: one vector of :data:`WIDTH`)."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = shape or (WIDTH,)
    return torch.randn(BATCH, *shape, generator=generator), torch.randn(BATCH, *shape, generator=generator)


def tokens(step: int, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the next ones."""
    generator = torch.Generator().manual_seed(200 + step)
    x = torch.randint(0, VOCABULARY, (BATCH, length), generator=generator)
    return x, (x * 3 + 1) % VOCABULARY


def square_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target.float()).pow(2).mean()


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), target.reshape(-1))


def train(
    world: World,
    model: Model,
    steps: int = 3,
    first: int = 0,
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = vectors,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = square_error,
) -> None:
    """Steps ``first`` to ``first + steps - 1`` of the ordinary kind."""
    for step in range(first, first + steps):
        x, y = data(step)
        model.backward(loss(model(world.share(x)), world.share(y)))
        model.step()


class Block(nn.Module):
    """A residual block of three parameterised parts."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Three blocks and a head."""

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

"""Parameter groups, every elementwise optimizer, norms and clipping: against the plain process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.ranks import run_on_ranks
from zerotune.config.errors import UsageError
from zerotune.config.knobs import Knobs
from zerotune.zero.elementwise import refuse_unless_elementwise
from zerotune.zero.optimizer import dividing_gradients

TOLERANCE = 1e-5
STEPS = 4
LIMIT_S = 180.0
PLAIN: dict[str, Any] = {"param_persistence_threshold": 0}
KNOBS: list[dict[str, Any]] = [
    PLAIN,
    PLAIN | {"stage": 0},
    PLAIN | {"stage": 1},
    PLAIN | {"stage": 2},
    {"param_persistence_threshold": 10**6},
]


def small_model() -> nn.Module:
    """Two layers whose gradients differ by orders of magnitude; the biases leave most ranks nothing but padding."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
    with torch.no_grad():
        model[2].weight.mul_(30)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 7, generator=generator), torch.randn(12, 3, generator=generator)


# ----------------------------------------------------------------------------------------------------- optimizers


def matrices_and_vectors(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(module.parameters())
    return [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]


def three_rates(module: nn.Module) -> optim.Optimizer:
    matrices, vectors = matrices_and_vectors(module)
    groups = [
        {"params": matrices[:1], "lr": 0.1, "weight_decay": 0.3},
        {"params": matrices[1:], "lr": 0.01, "weight_decay": 0.3},
        {"params": vectors, "lr": 0.0},
    ]
    return optim.SGD(groups, lr=1.0)


def decay_on_matrices(module: nn.Module) -> optim.Optimizer:
    matrices, vectors = matrices_and_vectors(module)
    return optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        fused=True,
    )


def one_group(module: nn.Module) -> optim.Optimizer:
    return optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def three_equal_groups(module: nn.Module) -> optim.Optimizer:
    params = list(module.parameters())
    return optim.AdamW(
        [{"params": ps} for ps in (params[1:2], params[2:], params[:1])], lr=0.01, weight_decay=0.1
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "groups: three rates": three_rates,
    "groups: decay on matrices": decay_on_matrices,
    "groups: one": one_group,
    "groups: three equal ones": three_equal_groups,
    "sgd momentum": lambda m: optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "sgd nesterov": lambda m: optim.SGD(
        m.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd dampened, fused": lambda m: optim.SGD(
        m.parameters(), lr=0.01, momentum=0.9, dampening=0.2, fused=True
    ),
    "adam": lambda m: optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "adam amsgrad": lambda m: optim.Adam(m.parameters(), lr=0.01, amsgrad=True, foreach=False),
    "adamw foreach": lambda m: optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw fused": lambda m: optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "adamw tensor rate": lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "rmsprop": lambda m: optim.RMSprop(m.parameters(), lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda m: optim.Adagrad(m.parameters(), lr=0.01, initial_accumulator_value=0.1),
    "adagrad fused": lambda m: optim.Adagrad(m.parameters(), lr=0.01, fused=True),
    "adamax": lambda m: optim.Adamax(m.parameters(), lr=0.01),
    "nadam": lambda m: optim.NAdam(m.parameters(), lr=0.01),
    "radam": lambda m: optim.RAdam(m.parameters(), lr=0.01),
    "adadelta": lambda m: optim.Adadelta(m.parameters(), lr=1.0),
    "rprop": lambda m: optim.Rprop(m.parameters(), lr=0.01),
    "asgd": lambda m: optim.ASGD(m.parameters(), lr=0.01),
}


def plain(name: str) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = small_model()
    optimizer = OPTIMIZERS[name](model)
    for step in range(STEPS):
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in model.state_dict().items()}


def with_engine(
    rank: int, size: int, names: list[str], every: list[dict[str, Any]]
) -> list[dict[str, torch.Tensor]]:
    import zerotune

    states = []
    for name in names:
        for knobs in every:
            model = small_model()
            engine = zerotune.ZeroEngine(model, OPTIMIZERS[name](model), Knobs(**knobs))
            for step in range(STEPS):
                x, y = (t[rank * 12 // size : (rank + 1) * 12 // size] for t in batch(step))
                engine.backward(nn.functional.mse_loss(engine(x), y))
                engine.step()
            states.append(engine.full_state_dict())
            engine.close()
    return states


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_elementwise_optimizer_equals_the_plain_process(ranks: int) -> None:
    names = list(OPTIMIZERS)
    every = [KNOBS[0], KNOBS[ranks]]
    expected = [plain(name) for name in names for _ in every]
    labels = [(name, knobs) for name in names for knobs in every]
    for states in run_on_ranks(ranks, with_engine, names, every, limit=LIMIT_S):
        for label, state, want in zip(labels, states, expected, strict=True):
            for key, value in want.items():
                assert torch.allclose(state[key], value, rtol=1e-5, atol=TOLERANCE), (label, key)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad])
def test_a_fused_optimizer_multiplies_gradients_as_it_reads_them(kind: Any) -> None:
    factor = 0.37
    found = []
    for fused in (True, False):
        torch.manual_seed(3)
        params = [nn.Parameter(torch.randn(33)) for _ in range(2)]
        optimizer = kind([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}], lr=0.01, fused=fused)
        for _ in range(3):
            with dividing_gradients(optimizer, factor) as left:
                assert left == (1.0 if fused else factor)
                for param in params:
                    param.grad = torch.randn(33) * left
                optimizer.step()
            assert not hasattr(optimizer, "grad_scale")
        found.append(params)
    torch.testing.assert_close(found[0], found[1])


def test_gradients_are_multiplied_first_where_somebody_else_would_see_them() -> None:
    def left(optimizer: optim.Optimizer, factor: float = 0.5) -> float:
        with dividing_gradients(optimizer, factor) as left:
            return left

    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    fused = optim.AdamW(params, fused=True)
    assert left(fused) == 1.0
    assert [left(fused, factor) for factor in (0.0, 1.0, 1e-39, math.inf)] == [0.0, 1.0, 1e-39, math.inf]
    first_is_frozen = optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], fused=True)
    first_is_frozen.param_groups[0]["params"] = []
    assert left(first_is_frozen) == 1.0
    in_part = optim.AdamW([{"params": params[:1]}, {"params": params[1:], "fused": False}], fused=True)
    assert left(in_part) == 0.5
    for_all = register_optimizer_step_pre_hook(lambda *_: None)
    assert left(fused) == 0.5
    for_all.remove()
    fused.register_step_pre_hook(lambda *_: None)
    assert left(fused) == 0.5


def test_parameter_groups_at_every_stage() -> None:
    names = [name for name in OPTIMIZERS if name.startswith("groups")]
    for states in run_on_ranks(3, with_engine, names, KNOBS, limit=LIMIT_S):
        by_name = {name: states[i * len(KNOBS) : (i + 1) * len(KNOBS)] for i, name in enumerate(names)}
        for name, found in by_name.items():
            want = plain(name)
            for state in found:
                assert all(torch.allclose(state[k], v, atol=TOLERANCE) for k, v in want.items()), name
        start = small_model().state_dict()
        for state in by_name["groups: three rates"]:
            assert torch.equal(state["0.bias"], start["0.bias"]) and torch.equal(
                state["2.bias"], start["2.bias"]
            )
        for one, three in zip(by_name["groups: one"], by_name["groups: three equal ones"], strict=True):
            assert all(torch.equal(one[k], three[k]) for k in one), "1 group = 3 equal groups, to the bit"


# ------------------------------------------------------------------------------------------------------- refusals


class LayerWise(optim.Optimizer):
    """In the manner of LAMB: the update of a parameter is scaled by the norm of all of it."""

    def __init__(self, params: Any, lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad * param.norm() / param.grad.norm()


class Signs(optim.Optimizer):
    """Elementwise, and not torch's."""

    def __init__(self, params: Any, lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad.sign()


class OwnMuon(optim.Muon):
    pass


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (optim.LBFGS, "LBFGS .* it keeps one history"),
        (optim.Muon, "Muon .* it orthogonalises whole matrices"),
        (optim.Adafactor, "Adafactor .* it factors the second moment"),
        (optim.SparseAdam, "SparseAdam .* sparse gradients"),
        (LayerWise, "LayerWise .* its update of a slice is not the slice of its update"),
        (OwnMuon, "OwnMuon .* it cannot update one slice"),
    ],
)
@pytest.mark.parametrize("is_built", [True, False])
def test_what_mixes_elements_is_refused_by_name_and_reason(kind: Any, reason: str, is_built: bool) -> None:
    import zerotune

    model = nn.Linear(6, 5, bias=False)
    if not is_built and kind is OwnMuon:
        pytest.skip("its own constructor refuses slices")
    with pytest.raises(UsageError, match=reason):
        zerotune.ZeroEngine(model, kind(model.parameters()) if is_built else kind)


def test_the_trial_leaves_an_optimizer_alone() -> None:
    param = nn.Parameter(torch.ones(3, 4))
    for optimizer in (Signs([param]), optim.AdamW([param], lr=0.0, fused=True), optim.Adagrad([param])):
        calls: list[int] = []
        optimizer.register_step_pre_hook(lambda *args, calls=calls: calls.append(1))
        optim.lr_scheduler.StepLR(optimizer, 3)
        before = {key: dict(value) for key, value in optimizer.state.items()}
        refuse_unless_elementwise(optimizer, torch.device("cpu"))
        assert not calls and torch.equal(param, torch.ones(3, 4)) and param.grad is None
        assert optimizer.state == before and optimizer.param_groups[0]["params"][0] is param


# ---------------------------------------------------------------------------------------------------- E04: norms


def norms_with_engine(rank: int, size: int, settings: list[dict[str, Any]]) -> list[Any]:
    import zerotune

    answers = []
    for setting in settings:
        model = small_model()
        engine = zerotune.ZeroEngine(
            model,
            optim.SGD(model.parameters(), lr=0.01),
            Knobs(**setting["knobs"]),
            clip_norm=setting["clip"],
            clip_norm_type=setting["type"],
        )
        norms = []
        for step in range(STEPS):
            x, y = (t[rank * 12 // size : (rank + 1) * 12 // size] for t in batch(step))
            engine.backward(nn.functional.mse_loss(engine(x), y))
            norms.append(engine.step().grad_norm)
        answers.append((norms, engine.full_state_dict()))
        engine.close()
    return answers


def norms_of_plain(norm_type: float, clip: float | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = small_model()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        limit = math.inf if clip is None else clip
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type=norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {key: value.detach() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_is_global_and_clips_every_rank_alike(ranks: int, norm_type: float) -> None:
    torch.set_num_threads(1)
    half = norms_of_plain(norm_type, None)[0][0] / 2
    clips = [half, math.inf, None]
    settings = [{"knobs": knobs, "clip": clip, "type": norm_type} for clip in clips for knobs in KNOBS]
    expected = {clip: norms_of_plain(norm_type, clip) for clip in clips}
    assert expected[half][0][0] > half, "it clips"
    everyone = run_on_ranks(ranks, norms_with_engine, settings, limit=LIMIT_S)
    for answers in everyone:
        for (norms, state), setting, (first_norms, _) in zip(answers, settings, everyone[0], strict=True):
            want, want_state = expected[setting["clip"]]
            assert norms == first_norms, "the same value on every rank"
            assert norms == pytest.approx(want, rel=1e-5), setting
            assert all(torch.allclose(state[k], v, atol=TOLERANCE) for k, v in want_state.items()), setting


def test_norms_that_are_none_are_refused() -> None:
    import zerotune

    for values in (
        {"clip_norm": -1.0},
        {"clip_norm": math.nan},
        {"clip_norm_type": 1},
        {"clip_norm_type": "max"},
    ):
        with pytest.raises(UsageError, match="clip_norm"):
            zerotune.ZeroEngine(small_model(), **values)  # type: ignore[arg-type]

"""What users build models from: every kind of module, parameter, input and output trains as it does in plain PyTorch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.cases.harness import (
    TWO,
    USUAL,
    VOCABULARY,
    WIDTH,
    Block,
    Stack,
    World,
    assert_parity,
    cross_entropy,
    square_error,
    tokens,
    train,
    vectors,
)


class _Shell(nn.Module):
    """A block before and one after whatever is tried, so that there is something to gather around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = Block()
        self.inner = inner
        self.last = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))


# ------------------------------------------------------------------------------------------------- parameters


class _OddParameters(nn.Module):
    """Scalars, empty ones, transposed ones, lists, dictionaries, plain attributes and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.3)
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(WIDTH) * 0.1) for _ in range(3)])
        self.mapped = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH) * 0.1)})
        self.unused = nn.Parameter(torch.ones(5))
        self.also = [self.listed[0], self.scale]  # plain attributes that hold parameters
        self.hidden = [
            nn.Linear(WIDTH, WIDTH)
        ]  # a module in a plain list: only its registered name is trained
        self.registered = self.hidden[0]
        self.register_buffer("shift", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("turns", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(3, 3).tril().bool())
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.turned + self.also[0] * self.also[1]
        for item in self.listed:
            x = x + item
        return self.hidden[0](x * self.scale + self.mapped["a"]) + self.empty.sum()


def odd_parameters(world: World) -> None:
    train(world, world.build(_Shell(_OddParameters())))


def convolutions(world: World) -> None:
    """channels_last weights, BatchNorm in evaluation mode after a running average, depthwise and transposed."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, WIDTH),
    ).to(memory_format=torch.channels_last)
    model = world.build(module, lr=0.05)
    for step in range(3):
        x, _ = vectors(step, 3, 4, 4)
        _, y = vectors(step)
        x = world.share(x).to(memory_format=torch.channels_last)
        model.backward(square_error(model(x), world.share(y)))
        model.step()


def batch_norm_frozen(world: World) -> None:
    """Statistics are each rank's own in training; in evaluation mode BatchNorm is like any other module."""
    module = _Shell(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    module.inner[1].running_mean.normal_()
    module.inner[1].eval()
    train(world, world.build(module))


def recurrent(world: World) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(VOCABULARY, WIDTH)
            self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
            self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, _ = self.lstm(self.emb(x))
            h, _ = self.gru(h)
            state = None
            out = []
            for t in range(h.shape[1]):
                state = self.cell(h[:, t], state)
                out.append(state[0])
            return self.head(torch.stack(out, 1))

    train(world, world.build(Recurrent(), lr=0.5), data=tokens, loss=cross_entropy)


def attention(world: World) -> None:
    """MultiheadAttention and transformer layers, in training and, by the fused path, in evaluation."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(VOCABULARY, WIDTH)
            self.mha = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.cross = nn.MultiheadAttention(
                WIDTH, 2, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True, batch_first=True
            )
            encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(encoder, 2)
            self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.emb(x)
            h = h + self.mha(h, h, h, need_weights=False)[0]
            h = h + self.cross(h, h, h)[0]
            e = self.encoder(h)
            return self.head(self.decoder(h, e))

    model = world.build(Attention())
    for step in range(3):
        train(world, model, steps=1, first=step, data=tokens, loss=cross_entropy)
        model.module.eval()
        with torch.no_grad():
            x, y = tokens(50)
            world.note(cross_entropy(model(x), y))
        model.module.train()


def bags(world: World) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")
            self.padded = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0, scale_grad_by_freq=False)
            self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
            self.prelu = nn.PReLU(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.prelu(self.bilinear(self.bag(x), self.padded(x).mean(1)))

    model = world.build(Bags(), lr=0.5)
    for step in range(3):
        x, _ = tokens(step)
        _, y = vectors(step)
        model.backward(square_error(model(world.share(x)), world.share(y)))
        model.step()


def normalised_weights(world: World) -> None:
    """Parametrizations and the older hooks that recompute a weight before each forward."""
    inner = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
        nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    )
    train(world, world.build(_Shell(inner), lr=0.02))


def spectral_norms(world: World) -> None:
    """Both kinds keep an estimate in buffers that every training forward moves."""
    inner = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    )
    train(world, world.build(_Shell(inner), lr=0.02))


# --------------------------------------------------------------------------------------------- inputs and outputs


@dataclass
class _Answer:
    logits: torch.Tensor
    extras: dict[str, Any]


class _Named(NamedTuple):
    value: torch.Tensor
    other: torch.Tensor


class _Structures(nn.Module):
    """Keyword arguments only, nested dictionaries, dataclasses and named tuples; one output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Structured() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, batch: dict[str, Any]) -> _Answer:
        named = _Named(batch["in"]["x"], batch["in"]["x"])
        for block in self.blocks:
            named = block(pair=named)
        return _Answer(self.head(named.value), {"unused": named.other})


class _Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, pair: _Named) -> _Named:
        return _Named(self.a(pair.value), self.b(pair.value))


def structures(world: World) -> None:
    model = world.build(_Structures())
    for step in range(4):
        x, y = vectors(step)
        answer = model(batch={"in": {"x": world.share(x)}, "note": "text"})
        loss = square_error(answer.logits, world.share(y))
        if step == 3:
            loss = loss + 0.1 * answer.extras["unused"].pow(2).mean()
        model.backward(loss)
        model.step()


class _Views(nn.Module):
    """Outputs that are views, that are changed in place by the caller, and modules that return what they got."""

    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Linear(WIDTH, 2 * WIDTH)
        self.same = nn.Identity()
        self.gain = _ReturnsItsParameter()
        self.block = Block()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.split(x).chunk(2, dim=-1)
        a = F.relu(a * 1.0, inplace=True)
        h = self.same(self.same(a)) + b
        h = self.block(h)
        h.mul_(0.5)  # the block's own output, in place
        h[:, :3] += 1.0
        h = h * self.gain()
        return F.gelu(self.after(h)).unsqueeze(0).squeeze(0)


class _ReturnsItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((WIDTH,), 1.3))
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self) -> torch.Tensor:
        return self.value


def views(world: World) -> None:
    train(world, world.build(_Views()))


class _Called(nn.Module):
    """Shared modules called several times, a different number of times from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.unused = Block()
        self.times = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.shared(torch.tanh(self.blocks[0](x)))
        return self.shared(self.blocks[1](x))


def called_often(world: World) -> None:
    model = world.build(_Called())
    for step, times in enumerate((2, 3, 1, 3, 2)):
        model.module.times = times
        train(world, model, steps=1, first=step)


def gradients_of_inputs(world: World) -> None:
    model = world.build(Stack())
    for step in range(3):
        x, y = vectors(step)
        mine = world.share(x).requires_grad_()
        model.backward(square_error(model(mine), world.share(y)))
        assert mine.grad is not None
        world.note_mean(mine.grad.pow(2).sum() / world.size)  # each rank's mean is over 1/N of the rows
        model.step()


def two_forwards_one_backward(world: World) -> None:
    """A contrastive pair: both passes' activations wait for one backward."""
    model = world.build(Stack())
    for step in range(3):
        x, y = vectors(step)
        one, two = model(world.share(x)), model(world.share(y))
        model.backward(square_error(one, two) + 0.1 * square_error(one, world.share(y)))
        model.step()


def second_backward(world: World) -> None:
    """Two losses of one graph, propagated one after the other."""
    model = world.build(Stack())
    for step in range(3):
        x, y = vectors(step)
        out = model(world.share(x))
        model.backward(square_error(out, world.share(y)), retain_graph=True)
        model.backward(out.abs().mean(), same_items=True)
        model.step()


class _Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_WithCompiledMlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _WithCompiledMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = _Mlp()
        self.mlp.compile(fullgraph=True, backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def compiled_inside(world: World) -> None:
    train(world, world.build(_Compiled()), steps=4)


class _AutogradInside(nn.Module):
    """no_grad and autocast sections, a detached target, and a custom function that saves a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.blocks[1](x)
        h = self.blocks[0](x)
        h = _Product.apply(h, self.weight)
        return self.blocks[1](h) + 0.1 * target


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, turned = ctx.saved_tensors
        return grad @ turned.t(), grad.t() @ x


def autograd_inside(world: World) -> None:
    train(world, world.build(_AutogradInside()))


def user_hooks(world: World) -> None:
    """Forward, full backward and tensor hooks see and may change what they see in plain PyTorch."""
    module = Stack()
    seen: list[float] = []
    module.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 1.1,))
    module.blocks[1].register_forward_hook(lambda m, args, out: out * 0.9)
    module.blocks[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    module.blocks[2].up.register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))
    module.blocks[2].register_forward_pre_hook(lambda m, args: seen.append(float(m.up.weight.detach().sum())))
    module.blocks[2].register_forward_hook(
        lambda m, args, out: seen.append(float(m.down.weight.detach().sum()))
    )
    model = world.build(module)
    late = module.blocks[0].register_forward_hook(lambda m, args, out: out + m.up.bias.sum())
    module.head.register_forward_pre_hook(lambda m, args: seen.append(float(m.weight.detach().sum())))
    train(world, model)
    late.remove()
    train(world, model, first=3, steps=2)
    for value in seen:
        world.note(value)


def parameter_hooks(world: World) -> None:
    """Hooks on parameters: a tensor hook that scales, and one after accumulation, per window."""
    module = Stack()
    module.head.weight.register_hook(lambda g: g * 0.5)
    seen = []
    module.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    train(world, world.build(module))
    assert seen == [True] * 3


def generation(world: World) -> None:
    """A loop that grows its input, between steps of training."""

    class Next(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(VOCABULARY, WIDTH)
            self.stack = Stack()
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.stack(self.emb(x)))

    model = world.build(Next(), lr=0.5)
    for step in range(3):
        train(world, model, steps=1, first=step, data=tokens, loss=cross_entropy)
        with torch.inference_mode():
            text = torch.zeros(1, 1, dtype=torch.long)
            for _ in range(4):
                text = torch.cat([text, model(text)[:, -1:].argmax(-1)], dim=1)
        world.note(text.sum())


def teacher_and_student(world: World) -> None:
    """Two engines in one process: the teacher runs inside the student's step, then learns itself."""
    torch.manual_seed(1)
    student = world.build(Stack())
    teacher = world.build(Stack(2), lr=0.05)
    for step in range(3):
        x, y = vectors(step)
        out = student(world.share(x))
        with torch.no_grad():
            target = teacher(world.share(x))
        student.backward(square_error(out, target))
        student.step()
        teacher.backward(square_error(teacher(world.share(x)), world.share(y)))
        teacher.step()


def raises_and_goes_on(world: World) -> None:
    """The same error on all ranks, in forward and in backward, caught by the user; the window starts again."""

    class Fragile(nn.Module):
        fail = ""

        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack()
            self.end = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.stack.blocks[0](x)
            if self.fail == "forward":
                raise ValueError("in forward")
            h = self.stack(h)
            if self.fail == "backward":
                h.register_hook(_raise)
            return self.end(h)

    model = world.build(Fragile())
    for step in range(6):
        x, y = vectors(step)
        Fragile.fail = {1: "forward", 3: "backward"}.get(step, "")
        try:
            model.backward(square_error(model(world.share(x)), world.share(y)))
        except ValueError:
            model.optimizer.zero_grad()
            continue
        model.step()


def _raise(grad: torch.Tensor) -> None:
    raise ValueError("in backward")


def raises_within_a_window(world: World) -> None:
    """A forward that fails after a good micro-batch: the window keeps what it has, and the step is not stale."""

    class Fragile(Stack):
        fail = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.blocks[0](x)
            if self.fail:
                raise ValueError("in forward")
            return super().forward(h)

    model = world.build(Fragile())
    for step in range(4):
        for micro in range(3):
            x, y = vectors(10 * step + micro)
            Fragile.fail = step == 1 and micro == 2
            with contextlib.suppress(ValueError):
                model.backward(square_error(model(world.share(x)), world.share(y)))
        model.step()


class _Falls(nn.Module):
    """Tries one branch, and falls back on another when it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.risky = _Risky()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        with contextlib.suppress(ValueError):
            x = self.risky(x)
        return self.blocks[1](x)


class _Risky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(_Raises() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[1](self.inner[0](x))


class _Raises(nn.Module):
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("not today")
        return self.linear(x)


def raises_and_is_caught_inside(world: World) -> None:
    model = world.build(_Falls())
    for step in range(5):
        model.module.risky.inner[1].fails = step in (1, 2)
        train(world, model, steps=1, first=step)


SCENARIOS = [
    raises_and_is_caught_inside,
    odd_parameters,
    convolutions,
    batch_norm_frozen,
    recurrent,
    attention,
    bags,
    normalised_weights,
    spectral_norms,
    structures,
    views,
    called_often,
    gradients_of_inputs,
    two_forwards_one_backward,
    second_backward,
    compiled_inside,
    autograd_inside,
    user_hooks,
    parameter_hooks,
    generation,
    teacher_and_student,
    raises_and_goes_on,
    raises_within_a_window,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_trains_as_in_plain_pytorch(scenario: Any) -> None:
    assert_parity(scenario, [TWO] if scenario is compiled_inside else USUAL)

"""Random modules: a small tree of plain data, and the one builder that makes an ``nn.Module`` of it.

Every node maps a tensor [B, T, D] to one of the same shape, so that any tree of nodes is a model. What nodes share
(modules, weights) stands in a pool of linear layers that they name by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LENGTH = 3
INPUTS = 5
TARGETS = 3


@dataclass(frozen=True, repr=False)
class Node:
    """One node of a model: its kind, a number and a flag that the kind gives a meaning, and its children."""

    kind: str
    size: int = 1
    flag: bool = False
    children: tuple[Node, ...] = ()

    def __repr__(self) -> str:
        parts = [repr(self.kind)]
        if self.size != 1:
            parts.append(f"size={self.size}")
        if self.flag:
            parts.append("flag=True")
        if self.children:
            parts.append(f"children=({', '.join(map(repr, self.children))},)")
        return f"Node({', '.join(parts)})"

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Model:
    """A model as plain data.

    Attributes:
        body: Between stem and head.
        width: D.
        vocabulary: Rows of the embedding.
        pool: Linear layers to share, each with a bias or without.
        pool_at_root: Whether the root registers all of the pool; otherwise only what no node registers.
        tied_head: The head is the embedding's weight, used by the root.
        frozen: Stem and head, but for the head's bias.
        outputs: What the root returns: ``tensor``, ``tuple``, ``dict`` or ``nested``.
    """

    body: Node
    width: int = 4
    vocabulary: int = 7
    pool: tuple[bool, ...] = (True,)
    pool_at_root: bool = False
    tied_head: bool = False
    frozen: bool = False
    outputs: str = "tensor"


class Clock:
    """What branches and lookups depend on beside their input; not part of the model."""

    def __init__(self) -> None:
        self.step = 0
        self.micro = 0
        self.tokens = torch.zeros(0, dtype=torch.long)


@dataclass
class Outputs:
    """A dataclass that a module returns."""

    main: Tensor
    others: list[Tensor]
    name: str = "outputs"


def build(model: Model, checkpointing: bool = True) -> tuple[nn.Module, Clock]:
    """Build a model, always with the same values.

    Args:
        model: The description.
        checkpointing: Whether ``checkpoint`` nodes recompute; the plain process need not.
    """
    torch.manual_seed(5)
    builder = _Builder(model, checkpointing)
    return Root(model, builder), builder.clock


class Root(nn.Module):
    """Stem, body and head."""

    def __init__(self, model: Model, builder: _Builder) -> None:
        super().__init__()
        self.outputs = model.outputs
        self.stem = nn.Linear(INPUTS, model.width)
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        self.body = builder.build(model.body)
        self.head = None if model.tied_head else nn.Linear(model.width, TARGETS)
        self.bias = nn.Parameter(torch.zeros(model.vocabulary)) if model.tied_head else None
        found = set(self.body.modules())
        loose = [layer for layer in builder.pool if model.pool_at_root or layer not in found]
        self.pool = nn.ModuleList(loose)
        if model.frozen:
            for module in (self.stem, self.embedding, self.head):
                if module is not None:
                    module.requires_grad_(False)
            if self.head is not None:
                self.head.bias.requires_grad_(True)

    def forward(self, batch: dict[str, Any]) -> Any:
        h = torch.tanh(self.stem(batch["x"])) + 0.5 * self.embedding(batch["more"][0])
        h = self.body(h)
        y = F.linear(h, self.embedding.weight, self.bias) if self.head is None else self.head(h)
        match self.outputs:
            case "tuple":
                return y, h
            case "dict":
                return {"y": y, "h": [h]}
            case "nested":
                return Outputs(y, [h])
        return torch.cat([y, h], dim=-1)


def loss_terms(model: Model, output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two means over the batch: the error, and how large the hidden state is."""
    match model.outputs:
        case "tuple":
            prediction, h = output
        case "dict":
            prediction, h = output["y"], output["h"][0]
        case "nested":
            prediction, h = output.main, output.others[0]
        case _:
            prediction, h = output[..., : -model.width], output[..., -model.width :]
    return F.mse_loss(prediction, y[..., : prediction.shape[-1]]), 0.1 * h.square().mean()


class _Builder:
    def __init__(self, model: Model, checkpointing: bool) -> None:
        self.clock = Clock()
        self.width = model.width
        self.checkpointing = checkpointing
        self.pool = [nn.Linear(model.width, model.width, bias=has_bias) for has_bias in model.pool]

    def build(self, node: Node) -> nn.Module:
        make: Callable[[Node], nn.Module] = getattr(self, f"_{node.kind}")
        return make(node)

    def _shared(self, node: Node) -> nn.Linear:
        return self.pool[node.size % len(self.pool)]

    # ------------------------------------------------------------------------------------------------ leaves

    def _linear(self, node: Node) -> nn.Module:
        return nn.Linear(self.width, self.width, bias=node.flag)

    def _mlp(self, node: Node) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.width, node.size), nn.Tanh(), nn.Linear(node.size, self.width, bias=node.flag)
        )

    def _norm(self, node: Node) -> nn.Module:
        # A large eps keeps the derivative of a norm over few elements bounded.
        kind = nn.RMSNorm if node.flag else nn.LayerNorm
        return kind(self.width, eps=0.1)

    def _attention(self, node: Node) -> nn.Module:
        return Attention(nn.MultiheadAttention(self.width, 1, bias=node.flag, batch_first=True))

    def _encoder(self, node: Node) -> nn.Module:
        return nn.TransformerEncoderLayer(
            self.width, 1, node.size, dropout=0.0, layer_norm_eps=0.1, batch_first=True, norm_first=node.flag
        )

    def _conv(self, node: Node) -> nn.Module:
        return nn.Conv1d(LENGTH, LENGTH, 3, padding=1, groups=LENGTH if node.flag else 1)

    def _scale(self, node: Node) -> nn.Module:
        return Elementwise((), self.width)

    def _vector(self, node: Node) -> nn.Module:
        return Elementwise((1, 1, self.width) if node.flag else (LENGTH, 1), self.width)

    def _table(self, node: Node) -> nn.Module:
        return Table(self.clock, node.size, self.width)

    def _params(self, node: Node) -> nn.Module:
        return Params(self.width, node.flag)

    def _buffers(self, node: Node) -> nn.Module:
        return Buffers(self.width, node.flag)

    def _hollow(self, node: Node) -> nn.Module:
        return Hollow(self.width)

    def _strided(self, node: Node) -> nn.Module:
        return Strided(self.width)

    def _alias(self, node: Node) -> nn.Module:
        return Alias(self.width)

    def _provider(self, node: Node) -> nn.Module:
        return Asks(Provider(self.width))

    def _normed(self, node: Node) -> nn.Module:
        layer = nn.Linear(self.width, self.width)
        nn.init.constant_(layer.weight, 0.5)
        return nn.utils.parametrizations.weight_norm(layer)

    def _identity(self, node: Node) -> nn.Module:
        return nn.Identity()

    def _inplace(self, node: Node) -> nn.Module:
        return InPlace(nn.Linear(self.width, self.width, bias=node.flag))

    def _function(self, node: Node) -> nn.Module:
        return OwnFunction(self.width)

    def _cast(self, node: Node) -> nn.Module:
        return InDouble(self.width)

    def _hooked(self, node: Node) -> nn.Module:
        layer = nn.Linear(self.width, self.width)
        layer.weight.register_hook(lambda grad: 0.5 * grad)
        return layer

    def _ref(self, node: Node) -> nn.Module:
        return self._shared(node)

    def _tied(self, node: Node) -> nn.Module:
        layer = nn.Linear(self.width, self.width, bias=node.flag)
        layer.weight = self._shared(node).weight
        return layer

    def _borrow(self, node: Node) -> nn.Module:
        return Borrow(self._shared(node), node.flag)

    # -------------------------------------------------------------------------------------------- composites

    def _children(self, node: Node) -> list[nn.Module]:
        return [self.build(child) for child in node.children]

    def _sequential(self, node: Node) -> nn.Module:
        return nn.Sequential(*self._children(node))

    def _list(self, node: Node) -> nn.Module:
        return Loop(nn.ModuleList(self._children(node)), self.clock, node.size, node.flag)

    def _dict(self, node: Node) -> nn.Module:
        named = {f"part{i}": child for i, child in enumerate(self._children(node))}
        return Named(nn.ModuleDict(named))

    def _residual(self, node: Node) -> nn.Module:
        return Residual(*self._children(node))

    def _twice(self, node: Node) -> nn.Module:
        return Twice(*self._children(node))

    def _checkpoint(self, node: Node) -> nn.Module:
        return Checkpoint(*self._children(node), node.flag, self.checkpointing)

    def _branch(self, node: Node) -> nn.Module:
        return Branch(self._children(node), self.clock, node.flag)

    def _fork(self, node: Node) -> nn.Module:
        return Join(Fork(self._children(node), node.size, node.flag))

    def _freeze(self, node: Node) -> nn.Module:
        (child,) = self._children(node)
        return child.requires_grad_(False)

    def _silent(self, node: Node) -> nn.Module:
        return Silent(*self._children(node))

    def _stop(self, node: Node) -> nn.Module:
        return Stop(*self._children(node))

    def _keyword(self, node: Node) -> nn.Module:
        return Keyword(*self._children(node))

    def _delegate(self, node: Node) -> nn.Module:
        return Delegate(*self._children(node))

    def _unused(self, node: Node) -> nn.Module:
        return Unused(*self._children(node))


class Attention(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, h: Tensor) -> Tensor:
        return self.attention(h, h, h, need_weights=False)[0]


class Elementwise(nn.Module):
    """A parameter of an odd shape, broadcast over the state."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.rand(shape))

    def forward(self, h: Tensor) -> Tensor:
        return h * (1 + self.weight)


class Table(nn.Module):
    def __init__(self, clock: Clock, rows: int, width: int) -> None:
        super().__init__()
        self.clock = clock
        self.rows = nn.Embedding(rows, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.5 * self.rows(self.clock.tokens % self.rows.num_embeddings)


class Params(nn.Module):
    """Parameters in a container that is never called."""

    def __init__(self, width: int, as_dict: bool) -> None:
        super().__init__()
        first, second = nn.Parameter(torch.rand(width)), nn.Parameter(0.3 * torch.rand(width, width))
        self.own = (
            nn.ParameterDict({"a": first, "b": second}) if as_dict else nn.ParameterList([first, second])
        )

    def forward(self, h: Tensor) -> Tensor:
        first, second = self.own.values() if isinstance(self.own, nn.ParameterDict) else self.own
        return torch.tanh(h @ second) * first


class Buffers(nn.Module):
    def __init__(self, width: int, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("shift", torch.rand(width), persistent=persistent)
        self.gain = nn.Parameter(torch.rand(width, 1))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.shift * self.gain.mean()


class Hollow(nn.Module):
    """A parameter without elements beside one with one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, width))
        self.one = nn.Parameter(torch.rand(1))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.one + self.nothing.sum()


class Strided(nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.rand(width + 1, width).t()[:, :width])

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.weight


class Alias(nn.Module):
    """One parameter under two names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(0.3 * torch.rand(width, width))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h @ self.first) @ self.second.t()


class Provider(nn.Module):
    """Its output is its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.rand(width, width))

    def forward(self) -> Tensor:
        return self.weight


class Asks(nn.Module):
    def __init__(self, provider: Provider) -> None:
        super().__init__()
        self.provider = provider

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.provider())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight.t())
        return h @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, transposed = ctx.saved_tensors
        return grad @ transposed, torch.einsum("btd,bte->de", h, grad)


class OwnFunction(nn.Module):
    """An autograd function that saves a view of the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.rand(width, width))

    def forward(self, h: Tensor) -> Tensor:
        return _Product.apply(h, self.weight)


class InDouble(nn.Module):
    """Computes in another dtype, with a copy of its weight that it keeps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.rand(width, width))
        self.kept: list[Tensor] = []

    def forward(self, h: Tensor) -> Tensor:
        self.kept[:] = [self.weight.double()]
        return F.linear(h.double(), self.kept[0]).float()


class Borrow(nn.Module):
    """Uses the weight of a layer that is not its child."""

    def __init__(self, lender: nn.Linear, transposed: bool) -> None:
        super().__init__()
        self.lenders = [lender]
        self.transposed = transposed

    def forward(self, h: Tensor) -> Tensor:
        weight = self.lenders[0].weight
        return F.linear(h, weight.t() if self.transposed else weight)


class Loop(nn.Module):
    """A ModuleList, in an order that may change: forward, backward, with the first again, or by the step."""

    def __init__(self, parts: nn.ModuleList, clock: Clock, order: int, skips: bool) -> None:
        super().__init__()
        self.parts = parts
        self.clock = clock
        self.order = order % 4
        self.skips = skips

    def forward(self, h: Tensor) -> Tensor:
        parts = list(self.parts)
        if self.order == 1 or (self.order == 3 and self.clock.step % 2):
            parts.reverse()
        if self.order == 2:
            parts += parts[:1]
        if self.skips and len(parts) > 1:
            del parts[self.clock.step % len(parts)]
        for part in parts:
            h = torch.tanh(part(h))
        return h


class Named(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, h: Tensor) -> Tensor:
        return torch.stack([part(h) for part in self.parts.values()]).mean(0)


class Residual(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.5 * self.child(h)


class Twice(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, h: Tensor) -> Tensor:
        return self.child(torch.tanh(self.child(h)))


class Checkpoint(nn.Module):
    def __init__(self, child: nn.Module, reentrant: bool, recomputes: bool) -> None:
        super().__init__()
        self.child = child
        self.reentrant = reentrant
        self.recomputes = recomputes

    def forward(self, h: Tensor) -> Tensor:
        if not self.recomputes:
            return self.child(h)
        if self.reentrant and torch.is_grad_enabled() and not h.requires_grad:
            h = h.detach().requires_grad_()  # without it torch would drop the gradients of what is inside
        return checkpoint(self.child, h, use_reentrant=self.reentrant)


class Branch(nn.Module):
    """One child a step, or one a micro-batch, in turns."""

    def __init__(self, children: list[nn.Module], clock: Clock, by_micro: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.clock = clock
        self.by_micro = by_micro

    def forward(self, h: Tensor) -> Tensor:
        turn = self.clock.step + (self.clock.micro if self.by_micro else 0)
        return self.parts[turn % len(self.parts)](h)


class Fork(nn.Module):
    """Several outputs in a structure, of which one may be left unused."""

    def __init__(self, children: list[nn.Module], structure: int, drops: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.structure = structure % 4
        self.drops = drops

    def forward(self, h: Tensor) -> Any:
        main, *others = [part(h) for part in self.parts]
        if self.drops:
            others = others[:-1]
        match self.structure:
            case 0:
                return (main, *others)
            case 1:
                return {"main": main, "others": tuple(others)}
            case 2:
                return [main, [{"more": other} for other in others], None]
        return Outputs(main, others)


class Join(nn.Module):
    def __init__(self, fork: Fork) -> None:
        super().__init__()
        self.fork = fork

    def forward(self, h: Tensor) -> Tensor:
        match self.fork(h):
            case Outputs(main=main, others=others) | {"main": main, "others": others}:
                pass
            case [main, [*nested], None]:
                others = [item["more"] for item in nested]
            case (main, *others):
                pass
        for other in others:
            main = main + 0.3 * other
        return main


class Silent(nn.Module):
    """Calls its child without gradients."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            other = self.child(h)
        return h + 0.5 * other


class Stop(nn.Module):
    """No gradient goes through its child's input."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.5 * self.child(h.detach())


class Inner(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, *, state: dict[str, list[Tensor]], scale: float) -> Tensor:
        return scale * self.child(state["h"][0])


class Keyword(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.inner = Inner(child)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(state={"h": [h]}, scale=0.7)


class Delegate(nn.Module):
    """Forwards attributes to its child, as wrappers do."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("child"), name)

    def forward(self, h: Tensor) -> Tensor:
        return self.child(h)


class Unused(nn.Module):
    """Registers its child and never calls it."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, h: Tensor) -> Tensor:
        return h


class InPlace(nn.Module):
    """Changes the output of its layer in place."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h).mul_(0.9).tanh_()

"""Cutting a model into units: what is gathered and released together.

Units partition the parameters by identity. By default each repeated block is one; every parameter that is left over
joins the deepest module that encloses all its users, so that an embedding and a head are units of their own unless
their weight is tied, and a tied weight hangs at the module that calls both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from zerotune.schedule import Layout, ParamSize, UnitSize

_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers whose forward never runs, so that no hook of theirs can announce a use."""

_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that read their children's weights without calling the children."""


@dataclass
class Unit:
    """Parameters gathered and released together.

    Attributes:
        name: Name of the module at which they hang; empty for the root.
        module: That module: its calls are the unit's uses.
        names: First name of each parameter.
        params: The parameters, in the order of ``names``.
        is_block: Whether it is one of the model's repeated blocks.
        backward_needs_weights: Whether its backward pass reads its weights.
    """

    name: str
    module: nn.Module
    names: list[str] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)
    is_block: bool = False
    backward_needs_weights: bool = True

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.params)

    @property
    def label(self) -> str:
        """Name to show; the root's is spelt out."""
        return self.name or "(root)"


def cut_into_units(module: nn.Module, unit_size: int | str = "block") -> list[Unit]:
    """Cut a model into units.

    Args:
        module: The model; on any device, the meta device included.
        unit_size: ``"block"`` for one unit per repeated block, or a number of elements for the largest modules not
            above it.

    Returns:
        Units in the order of the module tree; together they hold every parameter once.
    """
    tree = _Tree(module)
    if unit_size == "block":
        anchors = dict.fromkeys(_blocks(module), True)
    else:
        anchors = dict.fromkeys(_largest_below(module, int(unit_size)), False)
    units: dict[nn.Module, Unit] = {}
    for name, param, users in tree.parameters():
        home = _home(tree, users, anchors)
        unit = units.get(home)
        if unit is None:
            unit = units[home] = Unit(tree.name[home], home, is_block=anchors.get(home, False))
        unit.names.append(name)
        unit.params.append(param)
    for unit in units.values():
        unit.backward_needs_weights = not _is_plain_embedding(unit.module)
    order = {submodule: index for index, submodule in enumerate(tree.name)}
    return sorted(units.values(), key=lambda unit: order[unit.module])


def layout_of(units: Iterable[Unit], ranks: int, persistence_threshold: int = 0, stage: int = 3) -> Layout:
    """The scheduler's view of units.

    Args:
        units: As cut.
        ranks: Number of ranks, N.
        persistence_threshold: Parameters of at most this many elements stay full.
        stage: Below stage 3 every parameter stays full.
    """
    return Layout(
        tuple(
            UnitSize(
                unit.label,
                tuple(
                    ParamSize(
                        name, p.numel(), p.requires_grad, stage < 3 or p.numel() <= persistence_threshold
                    )
                    for name, p in zip(unit.names, unit.params, strict=True)
                ),
                unit.backward_needs_weights,
                unit.is_block,
            )
            for unit in units
        ),
        ranks,
    )


def largest_block(module: nn.Module) -> int:
    """Elements of the largest repeated block, which ``auto`` sizes stand for; of the largest unit if none repeats."""
    units = cut_into_units(module)
    blocks = [unit.numel for unit in units if unit.is_block]
    return max(blocks or [unit.numel for unit in units], default=0)


class _Tree:
    """Names, owners and ancestors in a module tree in which modules and parameters may appear more than once."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.name: dict[nn.Module, str] = {}
        self.parent: dict[nn.Module, nn.Module] = {}
        for name, submodule in root.named_modules():
            self.name[submodule] = name
            for child in submodule.children():
                self.parent.setdefault(child, submodule)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, list[nn.Module]]]:
        """Every parameter once: its first name, itself, and the modules that own it."""
        found: dict[nn.Parameter, tuple[str, list[nn.Module]]] = {}
        for submodule, prefix in self.name.items():
            for local, param in submodule._parameters.items():
                if param is not None:
                    full_name = f"{prefix}.{local}" if prefix else local
                    found.setdefault(param, (full_name, []))[1].append(submodule)
        for param, (name, owners) in found.items():
            yield name, param, owners

    def ancestors(self, submodule: nn.Module) -> Iterator[nn.Module]:
        """The module itself, then its parents up to the root."""
        yield submodule
        while submodule in self.parent:
            submodule = self.parent[submodule]
            yield submodule

    def deepest_enclosing(self, users: list[nn.Module]) -> nn.Module:
        if len(users) == 1:
            return users[0]
        wanted = set(users)
        for candidate in self.ancestors(users[0]):
            if wanted <= set(candidate.modules()):
                return candidate
        return self.root


def _home(tree: _Tree, users: list[nn.Module], anchors: dict[nn.Module, bool]) -> nn.Module:
    """The module at which a parameter hangs."""
    enclosing = tree.deepest_enclosing(users)
    home = enclosing
    for ancestor in tree.ancestors(enclosing):
        if ancestor in anchors:
            return ancestor
        if isinstance(ancestor, _OPAQUE):
            home = ancestor
    while isinstance(home, _NOT_CALLED) and home in tree.parent:
        home = tree.parent[home]
    return home


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost children of lists with two or more children of one class."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        children = list(module.children())
        classes = [type(child) for child in children]
        for child in children:
            if classes.count(type(child)) >= 2 and not isinstance(child, _NOT_CALLED):
                if next(child.parameters(), None) is not None:
                    yield child
            else:
                yield from _blocks(child)
        return
    for child in module.children():
        yield from _blocks(child)


def _largest_below(module: nn.Module, size: int) -> Iterator[nn.Module]:
    """The largest callable modules of at most ``size`` elements; a larger leaf stays for itself."""
    numel = sum(param.numel() for param in module.parameters())
    if numel == 0:
        return
    if numel <= size and not isinstance(module, _NOT_CALLED):
        yield module
    elif not isinstance(module, _OPAQUE):
        for child in module.children():
            yield from _largest_below(child, size)


def _is_plain_embedding(module: nn.Module) -> bool:
    """Whether a unit's backward reads no weights. Exactly ``nn.Embedding``: a subclass may do anything."""
    return type(module) is nn.Embedding and module.max_norm is None

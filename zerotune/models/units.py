"""Cutting a model into units: what is gathered and released together.

Units partition the parameters by identity. By default each repeated block is one; every parameter that is left over
joins the deepest module that encloses all its users, so that an embedding and a head are units of their own unless
their weight is tied, and a tied weight hangs at the module that calls both.

[Note: leaf modules]
Where ranks take different branches through a module, its parts cannot be units: ranks would gather different ones. A
*leaf module* is one unit with everything inside, whatever of it runs; parts that did not run on a rank count as zeros in
the reduction. A mixture of experts is found by name; other modules that choose are named by the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from zerotune.config.errors import UsageError
from zerotune.schedule import Layout, ParamSize, UnitSize

_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers whose forward never runs, so that no hook of theirs can announce a use."""

_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that read their children's weights without calling the children."""


_MIXTURE = re.compile(r"(moe|mixtureofexperts)(block|layer|ffn|mlp|feedforward)?$", re.IGNORECASE)
"""What the class of a mixture of experts ends with; a model of many layers is named after them, too."""

_STACKS = ("layers", "blocks", "h")
"""Names of lists of layers, all of which run."""

LeafModules = Sequence[str] | Literal["auto"]
"""Names of modules, or of their classes; ``auto`` finds mixtures of experts."""


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


def cut_into_units(
    module: nn.Module, unit_size: int | str = "block", leaf_modules: LeafModules = "auto"
) -> list[Unit]:
    """Cut a model into units.

    Args:
        module: The model; on any device, the meta device included.
        unit_size: ``"block"`` for one unit per repeated block, or a number of elements for the largest modules not
            above it.
        leaf_modules: See [Note: leaf modules].

    Returns:
        Units in the order of the module tree; together they hold every parameter once.

    Raises:
        UsageError: A leaf module is not in the model.
    """
    tree = _Tree(module)
    if unit_size == "block":
        anchors = dict.fromkeys(_blocks(module), True)
    else:
        anchors = dict.fromkeys(_largest_below(module, int(unit_size)), False)
    leaves = _mixtures(tree) if leaf_modules == "auto" else _named_leaves(tree, leaf_modules)
    anchors = _outermost(tree, anchors | dict.fromkeys(leaves, False))
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
        ranks: Number of ranks, N. A rank that is alone has every parameter in full, whatever the stage.
        persistence_threshold: Parameters of at most this many elements stay full.
        stage: Below stage 3 every parameter stays full.
    """
    all_stay = stage < 3 or ranks == 1
    return Layout(
        tuple(
            UnitSize(
                unit.label,
                tuple(
                    ParamSize(
                        name, p.numel(), p.requires_grad, all_stay or p.numel() <= persistence_threshold
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


def repeated_blocks(module: nn.Module, leaf_modules: LeafModules = "auto") -> list[nn.Module]:
    """The model's repeated blocks, in the order of the module tree."""
    return [unit.module for unit in cut_into_units(module, leaf_modules=leaf_modules) if unit.is_block]


def largest_block(module: nn.Module, leaf_modules: LeafModules = "auto") -> int:
    """Elements of the largest repeated block, which ``auto`` sizes stand for; of the largest unit if none repeats."""
    units = cut_into_units(module, leaf_modules=leaf_modules)
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
            home = ancestor
            break
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


def _mixtures(tree: _Tree) -> Iterator[nn.Module]:
    """Modules that own a list of experts. Of the model itself only the list: the rest of it always runs."""
    for submodule, name in tree.name.items():
        if not isinstance(submodule, (nn.ModuleList, nn.ModuleDict)) or submodule is tree.root:
            continue
        owner = tree.parent[submodule]
        own_name = name.rsplit(".", 1)[-1].lower()
        if "expert" in own_name:
            yield submodule if owner is tree.root else owner
        elif owner is not tree.root and own_name not in _STACKS and _MIXTURE.search(type(owner).__name__):
            yield owner


def _named_leaves(tree: _Tree, names: Sequence[str]) -> Iterator[nn.Module]:
    for wanted in names:
        found = [m for m, name in tree.name.items() if wanted in (name, type(m).__name__)]
        if not found:
            raise UsageError(
                f"leaf_modules: the model has no module or class of modules named {wanted}",
                "name it as in model.named_modules(), or by its class",
            )
        yield from found


def _outermost(tree: _Tree, anchors: dict[nn.Module, bool]) -> dict[nn.Module, bool]:
    """Of modules that lie in one another only the outer ones."""
    return {
        anchor: is_block
        for anchor, is_block in anchors.items()
        if not any(ancestor in anchors for ancestor in tree.ancestors(anchor) if ancestor is not anchor)
    }


def _is_plain_embedding(module: nn.Module) -> bool:
    """Whether a unit's backward reads no weights. Exactly ``nn.Embedding``: a subclass may do anything."""
    return type(module) is nn.Embedding and module.max_norm is None

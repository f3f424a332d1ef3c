"""Is the model still the one that was taken over? What users do to parameters behind the engine's back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zerotune.config.errors import UsageError
from zerotune.models.access import not_reading
from zerotune.zero.shards import ShardedParam


class ManagedParameters:
    """Checks, once per accumulation window, that every parameter is managed, and which ones train.

    Args:
        module: The model.
        params: What the engine manages.
    """

    def __init__(self, module: nn.Module, params: Sequence[ShardedParam]) -> None:
        self._module = module
        self._params = params
        self._managed: Sequence[nn.Parameter] = [p.param for p in params]
        self._storages = [p.rows.untyped_storage()._cdata for p in params]
        self._versions = [param._version for param in self._managed]
        self._identities = self._identities_now()
        self._requires_grad = self._flags()

    def check_storages(self) -> None:
        """Refuse parameters that were added, replaced, moved or cast after set-up.

        Raises:
            UsageError: Names the parameter.
        """
        with not_reading():
            identities = self._identities_now()
            if identities != self._identities:
                self._refuse_strangers()
                self._identities = identities
            self._check_values()

    def _identities_now(self) -> list[int]:
        """Every parameter as it hangs in the modules; ``modules()`` would take ten times as long."""
        identities: list[int] = []
        left: list[nn.Module | None] = [self._module]
        seen: set[nn.Module] = set()
        while left:
            module = left.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            identities.extend(map(id, module._parameters.values()))
            left.extend(module._modules.values())
        return identities

    def _refuse_strangers(self) -> None:
        managed = set(self._managed)
        for param in self._module.parameters():
            if param not in managed:
                raise UsageError(
                    f"{self._name(param)} was added to the model after the engine was built, and is not managed",
                    "add it before, or build a new engine",
                )

    def _check_values(self) -> None:
        present = set(self._identities)  # what has left the model is nobody's business
        for index, (param, storage) in enumerate(zip(self._managed, self._storages, strict=True)):
            if id(param) not in present:
                continue
            if param.untyped_storage()._cdata != storage:
                raise UsageError(
                    f"{self._name(param)} was moved, cast or assigned after the engine was built",
                    "call .to() and assign .data before, or use engine.load_state_dict",
                )
            if param._version != self._versions[index]:
                self._versions[index] = param._version
                raise UsageError(
                    f"{self._name(param)} was changed in place, which is lost where the optimizer updates slices",
                    "change values with engine.load_state_dict, and derive constrained weights in forward",
                )

    def forget(self) -> None:
        """Let go of the parameters."""
        self._params = self._managed = ()
        self._storages.clear()

    def has_changed(self) -> bool:
        """Whether parameters were frozen or thawed since the last :meth:`accept`."""
        return self._flags() != self._requires_grad

    def accept(self) -> None:
        """Take the present flags as the ones to compare with."""
        self._requires_grad = self._flags()

    def check_unchanged(self) -> None:
        """Refuse a change of ``requires_grad`` within an accumulation window.

        Raises:
            UsageError: Names the parameter.
        """
        for param, required, now in zip(self._params, self._requires_grad, self._flags(), strict=True):
            if now is not required:
                raise UsageError(
                    f"{param.name}: requires_grad changed within an accumulation window",
                    "freeze and thaw between step() and the next forward",
                )

    def _flags(self) -> list[bool]:
        with not_reading():
            return [p.param.requires_grad for p in self._params]

    def _name(self, wanted: nn.Parameter) -> str:
        return next(
            (name for name, param in self._module.named_parameters() if param is wanted), "a parameter"
        )

"""What a configuration's model is, without giving it memory: for plans, spaces and relative sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zerotune.config.errors import UsageError
from zerotune.config.schema import JobConfig
from zerotune.models.build import build_model

log = logging.getLogger(__name__)

CPU_LIMIT = 2 * 10**9
"""Elements that a model may have which cannot be built on the meta device: 8 GB in fp32."""


@dataclass(frozen=True)
class ModelFacts:
    """A model without its weights.

    Attributes:
        module: The model, on the meta device if it can be built there; never trained, only looked at.
        parameters: Number of its elements, tied ones once.
        trainable_parameters: Those among them that have a gradient.
    """

    module: nn.Module
    parameters: int
    trainable_parameters: int


def describe(job: JobConfig) -> ModelFacts:
    """Build the job's model on the meta device, where it takes no memory.

    A user's model that cannot be built there, because it computes with weights as it makes them, is built on CPU.

    Raises:
        UsageError: The configuration or the user's code does not make a module, or it is too large for the CPU.
    """
    try:
        with torch.device("meta"):
            module = build_model(job.model, job.train.seed)
    except UsageError as error:
        if job.model.factory is None:
            raise
        log.info("the model cannot be built on the meta device, trying the CPU: %s", error)
        with _limited_size(), torch.device("cpu"):
            module = build_model(job.model, job.train.seed)
    parameters = list(module.parameters())
    return ModelFacts(
        module,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
    )


@contextmanager
def _limited_size() -> Iterator[None]:
    """Stop building a module once its parameters pass :data:`CPU_LIMIT` elements."""
    sizes: dict[int, int] = {}

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            sizes[id(parameter)] = parameter.numel()
        if sum(sizes.values()) > CPU_LIMIT:
            raise UsageError(
                f"the model has more than {CPU_LIMIT:.0e} parameters and cannot be built on the meta device",
                "let its factory create weights without computing with them",
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()

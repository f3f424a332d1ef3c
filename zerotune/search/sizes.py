"""Sizes of a job's model, which spaces and ``auto`` refer to."""

from __future__ import annotations

from zerotune.config.schema import JobConfig
from zerotune.config.space import ModelSizes
from zerotune.models.units import largest_block, repeated_blocks
from zerotune.train.describe import describe


def model_sizes(job: JobConfig) -> ModelSizes:
    """Measure the model without giving it memory.

    Raises:
        UsageError: The configuration or the user's code does not make a module.
    """
    facts = describe(job)
    return ModelSizes(
        block=largest_block(facts.module),
        model=facts.parameters,
        has_blocks=bool(repeated_blocks(facts.module, job.train.leaf_modules)),
        largest_parameter=max((p.numel() for p in facts.module.parameters()), default=0),
    )

"""Which dtypes: of compute and gathers, of gradients at rest, of what travels in reductions.

[Note: what is always fp32]
Master parameters, the optimizer's state, the sums of reductions, norms, and the gradient that the optimizer is given. So
a step smaller than half a step of the compute dtype is not lost, and no sum over ranks overflows or stagnates.

[Note: bytes per parameter]
With c bytes of the compute dtype, g of the gradient dtype and an optimizer of m fp32 moments (AdamW: 2), between backward
and step, not counting padding (slices are multiples of 16 elements), persistent parameters and the optimizer's step
counters (4 bytes per parameter tensor)::

    o = 4 m, and 4 more for the master copy unless the compute dtype is fp32

    stage 0     c +  g + o                    stage 2     c + (g + o) / N
    stage 1     c +  g + o / N                stage 3    (c + g + o) / N

    16-bit, AdamW, gradients in the compute dtype: 16   4 + 12/N   2 + 14/N   16/N
    16-bit, AdamW, gradients in fp32 (default):    18   6 + 12/N   2 + 16/N   18/N
    fp32, AdamW:                                   16   8 +  8/N   4 + 12/N   16/N

Stage 1, and ``accumulate: local``, keep the full gradient in the gradient dtype until the step, and its slice only within
the step. With gradients in the compute dtype, the step makes an fp32 copy of this rank's for as long as the optimizer
runs: 4/N bytes per parameter (4 at stage 0) in the ledger's peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

import torch

from zerotune.config.errors import UsageError

PrecisionName = Literal["fp32", "bf16", "fp16"]
DtypeChoice = Literal["fp32", "compute"]

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training.

    Attributes:
        name: ``fp32``, ``bf16`` or ``fp16``.
        compute: Of full parameters, activations and gathers.
        gradient: In which gradients are kept and summed over micro-batches.
        reduce: In which they travel; the sum over ranks is fp32 whatever travels.
    """

    name: PrecisionName
    compute: torch.dtype
    gradient: torch.dtype
    reduce: torch.dtype

    @classmethod
    def of(cls, name: str, gradient: str = "fp32", reduce: str = "compute") -> Self:
        """From the words of model.yaml.

        Raises:
            UsageError: A word is unknown.
        """
        if name not in _COMPUTE:
            raise UsageError(f"precision {name!r} is not known", f"use {', '.join(_COMPUTE)}")
        compute = _COMPUTE[name]
        dtypes = {"fp32": torch.float32, "compute": compute}
        for key, word in (("gradient_dtype", gradient), ("reduce_dtype", reduce)):
            if word not in dtypes:
                raise UsageError(f"{key} {word!r} is not known", "use fp32 or compute")
        return cls(name, compute, dtypes[gradient], dtypes[reduce])  # type: ignore[arg-type]

    @property
    def is_mixed(self) -> bool:
        """Whether masters are copies of their own."""
        return self.compute is not torch.float32

    def bytes_per_parameter(self, stage: int, ranks: int, moments: int = 2) -> Fraction:
        """Bytes of model states per parameter on one rank: [Note: bytes per parameter].

        Args:
            stage: 0 to 3.
            ranks: N.
            moments: fp32 values that the optimizer keeps per parameter.
        """
        state = 4 * moments + (4 if self.is_mixed else 0)
        shares = [Fraction(1, ranks if stage >= partitioned_from else 1) for partitioned_from in (3, 2, 1)]
        sizes = (self.compute.itemsize, self.gradient.itemsize, state)
        return sum((size * share for size, share in zip(sizes, shares, strict=True)), Fraction())

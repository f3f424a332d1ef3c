"""Loss scaling, and steps that are skipped because a gradient is not finite.

[Note: loss scaling]
fp16 has no gradients below 6e-8. Losses are multiplied by a scale before backward and gradients divided by it in the
step; a gradient that is not finite skips the step and halves the scale, and a row of good steps doubles it.

A micro-batch's loss is also weighted by its items, thousands of tokens maybe, which fp16 would not survive either. So it
is divided by a reference weight, a power of two near one rank's items of a step, which all ranks know from the last
step. It is 1 before the first step; that one is skipped if its items are too many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zerotune.config.errors import RunFailed, UsageError


@dataclass(frozen=True)
class LossScaling:
    """How the loss scale moves.

    Attributes:
        initial: Scale of the first step.
        growth: Factor after ``growth_interval`` good steps in a row.
        growth_interval: That many steps.
        backoff: Factor after a skipped step.
        minimum: The scale never falls below it.

    Raises:
        UsageError: A value is out of range.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    growth_interval: int = 2000
    backoff: float = 0.5
    minimum: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.minimum <= self.initial < math.inf):
            raise UsageError(
                f"a loss scale of {self.initial} with a minimum of {self.minimum} is out of range"
            )
        if not (1 <= self.growth < math.inf and 0 < self.backoff < 1 and self.growth_interval >= 1):
            raise UsageError(
                f"loss scaling with growth {self.growth}, backoff {self.backoff} and growth_interval "
                f"{self.growth_interval} is out of range"
            )


class LossScaler:
    """What losses are multiplied by. Its state is the same on every rank.

    Args:
        settings: How the scale moves; ``None`` for a scale of 1.
    """

    def __init__(self, settings: LossScaling | None) -> None:
        self._settings = settings
        self._reset()

    def _reset(self) -> None:
        self.scale = self._settings.initial if self._settings else 1.0
        self._reference = 1.0
        self._good_steps = 0
        self._is_foreign = (
            False  # as a checkpoint of another precision left it, until its open window is over
        )

    @property
    def factor(self) -> float:
        """What the loss of a micro-batch is multiplied by beside its weight, until the next update."""
        return self.scale / self._reference

    def update(self, is_skipped: bool, weight_per_rank: float) -> None:
        """After a step.

        Args:
            is_skipped: Whether a gradient was not finite.
            weight_per_rank: Items of the step over the number of ranks.
        """
        settings = self._settings
        if self._is_foreign or settings is None:
            self._reset()
            return
        before = self.factor
        if weight_per_rank > 0 and math.isfinite(weight_per_rank):
            self._reference = 2.0 ** math.floor(math.log2(weight_per_rank))
        if is_skipped:
            self._good_steps = 0
            if self.factor >= before:  # a larger reference has lowered it already
                self.scale = max(self.scale * settings.backoff, settings.minimum)
            return
        self._good_steps += 1
        if self._good_steps >= settings.growth_interval:
            self._good_steps = 0
            grown = self.scale * settings.growth
            self.scale = grown if math.isfinite(grown) else self.scale

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {
            "scale": self.scale,
            "reference": self._reference,
            "good_steps": self._good_steps,
            "is_dynamic": self._settings is not None,
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from :meth:`state`; without one, from the beginning.

        What a checkpoint of another precision holds is kept for the window that it left open, whose gradients carry it.
        """
        self._reset()
        if not state:
            return
        self.scale = float(state["scale"])
        self._reference = float(state["reference"])
        self._good_steps = int(state["good_steps"])
        self._is_foreign = bool(state["is_dynamic"]) != (self._settings is not None)


@dataclass(frozen=True)
class RankTrouble:
    """What one rank saw of a step that is skipped.

    Attributes:
        rank: Which.
        loss: Whether its loss is not finite.
        parameter: First parameter whose gradient on this rank is not finite, if it was looked for.
        slices: Whether the sum over ranks is not finite in its slices.
    """

    rank: int
    loss: bool
    parameter: str | None
    slices: bool


def in_words(troubles: list[RankTrouble]) -> str:
    """Whose gradient is not finite, and of which parameter, as far as it is known."""
    sources = [t for t in troubles if t.loss or t.parameter]
    if not sources:
        ranks = [str(t.rank) for t in troubles if t.slices]
        where = f"the slices of rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        return f"the gradient summed over ranks is not finite in {where}"
    clauses = []
    for trouble in sources[:4]:
        what = [f"the gradient of {trouble.parameter}"] if trouble.parameter else []
        if trouble.loss:
            what.insert(0, "the loss")
        clauses.append(f"{' and '.join(what)} on rank {trouble.rank}")
    more = len(sources) - 4
    clauses += [f"that of {more} more ranks"] if more > 0 else []
    return f"not finite: {'; '.join(clauses)}"


class SkippedSteps:
    """Counts skipped steps, so that there is an end to them.

    Args:
        limit: As many in a row end the run.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise UsageError(f"max_skipped_steps {limit} is below 1")
        self._limit = limit
        self.total = 0
        self.in_a_row = 0

    def note(self, is_skipped: bool) -> None:
        """Count a step."""
        self.total += is_skipped
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0

    def fail_if_too_many(self, step: int, troubles: list[RankTrouble], loss_scale: float) -> None:
        """End the run at the limit.

        Raises:
            RunFailed: It names the step, the ranks and, if known, the parameter.
        """
        if self.in_a_row < self._limit:
            return
        scale = f", at loss scale {loss_scale:g}" if loss_scale != 1.0 else ""
        last = f", the last of {self._limit} in a row" if self._limit > 1 else ""
        raise RunFailed(
            f"step {step} was skipped{last}{scale}: {in_words(troubles)}",
            "lower the learning rate, look at the data of these steps, or train in bf16 or fp32",
        )

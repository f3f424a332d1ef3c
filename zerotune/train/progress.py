"""Reports where a rank stands, at most twice a second."""

from __future__ import annotations

import time

from zerotune.train.context import Progress, RankContext
from zerotune.train.loop import Loop
from zerotune.train.memory import bytes_in_use

INTERVAL_S = 0.5


class Reporter:
    """Tells the driver about phases at once, and about steps no more often than every half second.

    Args:
        ctx: Where reports go.
    """

    def __init__(self, ctx: RankContext) -> None:
        self.ctx = ctx
        self.last = -INTERVAL_S
        self.skipped = 0

    def phase(self, phase: str, step: int = 0, steps: int | None = None) -> None:
        """A new phase begins."""
        self.ctx.report(Progress(phase=phase, step=step, steps=steps))

    def step(
        self, phase: str, loop: Loop, steps: int | None, seconds: float, done: int | None = None
    ) -> None:
        """A step was taken.

        Args:
            phase: Which phase it belongs to.
            loop: Took it.
            steps: Steps wanted.
            seconds: How long it took on this rank.
            done: Steps of the phase, if they are not counted from the first step of the training.
        """
        now = time.monotonic()
        done = loop.step if done is None else done
        new = loop.skipped[self.skipped :]
        if now - self.last < INTERVAL_S and done != steps and not new:
            return
        self.last = now
        self.skipped += len(new)
        self.ctx.report(
            Progress(
                phase=phase,
                step=done,
                steps=steps,
                loss=loop.losses[-1],
                # This rank's share times the ranks: near enough to look at, and nothing has to be exchanged.
                tokens_per_second=loop.tokens * loop.group.size / seconds,
                memory_bytes=bytes_in_use(loop.group.device),
                message=f"step {new[-1]} was skipped: a gradient was not finite" if new else None,
            )
        )

"""What one unit event costs beside the work: a model of many tiny units, with the engine and without.

    python -m tests.bench.events [--ranks 1] [--blocks 200] [--rounds 10] [--fsdp2]

A unit event is an entry to or an exit from a unit's use, in forward or in backward: four per unit and step. The
difference of the times of forward and backward, over the number of events, holds our Python and the calls of torch
that it makes: of a rank that is alone hooks and gradients, of two gathers, releases and reductions of tiny tensors as
well. The profile says which function takes it. A profiler makes Python slower, so that its shares count, not its
sums. Times are the processor's, of the thread that trains, and of all steps the shortest, so that other processes and
waiting count least; those of the whole process are beside them. The bar is 20 µs of our own Python per event.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerotune
from tests.ranks import run_on_ranks
from zerotune.engine import RankGroup

WIDTH = 16
WARMUP_STEPS = 4
SHOWN = 25
LIMIT_S = 600.0
PACKAGE = Path(zerotune.__file__).parent


class Chain(nn.Module):
    """Blocks of one small matrix each.

    Args:
        blocks: How many.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


class Timed:
    """Forward and backward, then the optimizer, each timed by itself.

    Attributes:
        passes_s: Forward and backward of every step, of this thread.
        process_s: The same of all threads.
        updates_s: The rest of every step, of this thread.
    """

    def __init__(self, passes: Callable[[], None], update: Callable[[], object]) -> None:
        self._passes = passes
        self._update = update
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.passes_s: list[float] = []
        self.process_s: list[float] = []
        self.updates_s: list[float] = []

    def step(self) -> None:
        started, of_all = time.thread_time(), time.process_time()
        self._passes()
        between = time.thread_time()
        self.process_s.append(time.process_time() - of_all)
        self._update()
        self.passes_s.append(between - started)
        self.updates_s.append(time.thread_time() - between)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def plain(blocks: int, x: Tensor) -> Timed:
    """Without the engine."""
    module = Chain(blocks)
    optimizer = adamw(module)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Timed(lambda: module(x).backward(), update)


def ours(blocks: int, x: Tensor) -> tuple[Timed, zerotune.ZeroEngine]:
    """With the engine."""
    module = Chain(blocks)
    engine = zerotune.ZeroEngine(module, adamw(module), group=RankGroup.default("cpu"))
    return Timed(lambda: engine.backward(engine(x)), engine.step), engine


def fsdp2(blocks: int, x: Tensor) -> Timed:
    """With FSDP2 on every block and the root."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = Chain(blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*module.blocks, module):
        fully_shard(each, mesh=mesh)
    optimizer = adamw(module)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Timed(lambda: module(x).backward(), update)


def events_of(engine: zerotune.ZeroEngine) -> int:
    """Events of units in a step."""
    return max(sum(1 for event in schedule.trace.events if event.units) for schedule in engine.schedules)


class Spent(NamedTuple):
    """What a function cost per event, µs, without what it calls; how often it was called."""

    cost: float
    calls: float
    name: str


def stats_of(function: Callable[[], None]) -> dict[tuple[str, int, str], Any]:
    """What :mod:`pstats` keeps of a call."""
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    function()
    profiler.disable()
    found: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    return found


def profile(step: Callable[[], None], steps: int, events: int, per_event: float) -> list[str]:
    """Microseconds per event of every function of ours, and of what it calls outside of the package; and how much of
    ``per_event`` µs is the former."""

    def repeated() -> None:
        for _ in range(steps):
            step()

    stats = stats_of(repeated)
    scale = 1 / steps / events
    own, called = [], []
    for (file, line, name), (_, calls, total, _, callers) in stats.items():
        if file.startswith(str(PACKAGE)):
            place = f"{Path(file).relative_to(PACKAGE)}:{line} {name}"
            own.append(Spent(total * scale * 1e6, calls * scale, place))
            continue
        ours = [spent for (caller, _, _), spent in callers.items() if caller.startswith(str(PACKAGE))]
        if ours:  # without what these call in turn
            cost, times = sum(spent[2] for spent in ours), sum(spent[0] for spent in ours)
            called.append(Spent(cost * scale * 1e6, times * scale, name))
    mine, others = (sum(each.cost for each in kind) for kind in (own, called))
    return [
        f"of these {mine / (mine + others) * per_event:.1f} µs are our own Python, by the profile's shares",
        *_table("functions of the package", own),
        *_table("what they call", called),
    ]


def _table(title: str, spent: list[Spent]) -> list[str]:
    lines = [
        "",
        f"{title}: {sum(each.cost for each in spent):.1f} µs per event under the profiler",
        "  µs per event   calls per event",
    ]
    lines += [
        f"  {each.cost:12.2f}   {each.calls:15.2f}   {each.name}"
        for each in sorted(spent, reverse=True)[:SHOWN]
    ]
    return lines


def found(rank: int, size: int, blocks: int, rounds: int, steps: int, with_fsdp2: bool) -> list[str]:
    """What to say, from one of the ranks."""
    x = torch.randn(1, WIDTH)
    without, (with_it, engine) = plain(blocks, x), ours(blocks, x)
    peers = [fsdp2(blocks, x)] if with_fsdp2 else []
    measured = [without, with_it, *peers]
    for each in measured:
        for _ in range(WARMUP_STEPS):
            each.step()
        each.forget()
    gc.collect()
    for number in range(rounds):
        for each in measured if number % 2 == 0 else reversed(measured):
            for _ in range(steps):
                each.step()
    events = events_of(engine)
    updates = min(with_it.updates_s) - min(without.updates_s)
    params = sum(1 for _ in engine.module.parameters())
    lines = [f"{blocks} units, {events} unit events in a step, rank {rank} of {size}"]
    for name, each in zip(("zerotune", "FSDP2"), (with_it, *peers), strict=False):
        passes, of_all = (
            (min(mine) - min(plainly)) / events * 1e6
            for mine, plainly in ((each.passes_s, without.passes_s), (each.process_s, without.process_s))
        )
        lines.append(
            f"{name}: forward and backward {passes:.1f} µs per event more than plain, all threads {of_all:.1f}"
        )
    lines.append(
        f"step(): {updates * 1e3:.2f} ms more than plain, {updates / params * 1e6:.1f} µs per parameter"
    )
    per_event = (min(with_it.passes_s) - min(without.passes_s)) / events * 1e6
    return lines + profile(with_it.step, 3, events, per_event)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="per round")
    parser.add_argument("--fsdp2", action="store_true", help="measure FSDP2 as well")
    options = parser.parse_args()
    settings = (options.blocks, options.rounds, options.steps, options.fsdp2)
    print("\n".join(run_on_ranks(options.ranks, found, *settings, limit=LIMIT_S)[0]))


if __name__ == "__main__":
    main()

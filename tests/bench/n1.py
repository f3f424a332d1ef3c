"""One rank: a step of the engine over a step of a plain PyTorch loop, in turns.

    python -m tests.bench.n1 [--rounds 10] [--steps 3] [--device cuda]

The same GPT of 10.5 M parameters, the same batch, the same fused AdamW; both read the loss in every step. The bar is 1.03.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import zerotune
from zerotune.config.knobs import Knobs
from zerotune.config.schema import GptConfig
from zerotune.engine import RankGroup
from zerotune.models.gpt import Gpt
from zerotune.models.task import cross_entropy
from zerotune.records import Interval
from zerotune.train.loop import synchronize
from zerotune.train.measure import median_interval, paired_ratio

CONFIG = GptConfig(layers=8, d_model=256, heads=8, vocab_size=8192, sequence_length=128)
BATCH = 4
WARMUP_STEPS = 4

Step = Callable[[], float]


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4, fused=True)  # type: ignore[arg-type]


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and their next tokens  # BT"""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, CONFIG.sequence_length + 1), generator=generator)
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return Gpt(CONFIG).to(device)


def plain(device: torch.device) -> Step:
    """A step of a plain loop; returns its loss."""
    module, (x, y) = model(device), batch(device)
    optimizer = adamw(module.parameters())

    def step() -> float:
        loss = cross_entropy(module(x), y, y.numel())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def ours(device: torch.device, knobs: Knobs) -> Step:
    """The same step through the engine, on a group of one."""
    module, (x, y) = model(device), batch(device)
    engine = zerotune.ZeroEngine(
        module, adamw(module.parameters()), knobs, group=RankGroup(None, 0, 1, device)
    )

    def step() -> float:
        loss = cross_entropy(engine(x), y, y.numel())
        engine.backward(loss)
        return engine.step().loss

    return step


def in_turns(steps: Sequence[Step], device: torch.device, rounds: int, count: int) -> list[list[float]]:
    """Seconds per step of each, one figure per round; every second round backwards."""
    for step in steps:
        for _ in range(WARMUP_STEPS):
            step()
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        order = range(len(steps)) if number % 2 == 0 else reversed(range(len(steps)))
        for index in order:
            synchronize(device)
            started = time.perf_counter()
            for _ in range(count):
                steps[index]()
            synchronize(device)
            times[index].append((time.perf_counter() - started) / count)
    return times


def measure(
    device: torch.device, knobs: dict[str, Knobs], rounds: int, count: int
) -> dict[str, tuple[Interval, Interval]]:
    """Step time, and its ratio to the plain loop's, of each setting; the plain loop's own are under ``plain``."""
    names = ["plain", *knobs]
    times = in_turns([plain(device), *(ours(device, each) for each in knobs.values())], device, rounds, count)
    return {
        name: (median_interval(mine), paired_ratio(mine, times[0]) if name != "plain" else _ONE)
        for name, mine in zip(names, times, strict=True)
    }


_ONE = Interval(value=1.0, low=1.0, high=1.0)

SETTINGS = {
    "stage 3": Knobs(),
    "stage 3, keep": Knobs(release="keep"),  # type: ignore[arg-type]
    "stage 2": Knobs(stage=2),
    "stage 0": Knobs(stage=0),
}


def lines(found: dict[str, tuple[Interval, Interval]]) -> list[str]:
    return [
        f"{name:14s} {time.value * 1e3:8.1f} ms [{time.low * 1e3:.1f}, {time.high * 1e3:.1f}]   "
        f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of plain"
        for name, (time, ratio) in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("\n".join(lines(measure(options.device, SETTINGS, options.rounds, options.steps))))


if __name__ == "__main__":
    main()

"""ZeRO-3 in a training loop of your own. Start it with torchrun::

torchrun --nproc-per-node 2 examples/own_loop.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import zerotune


class Residual(nn.Module):
    """A block: two layers beside a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a random function under ZeRO-3.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--release", choices=["after_use", "keep"], default="after_use")
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")

    # An ordinary model and an ordinary optimizer; the engine takes both over.
    model = nn.Sequential(nn.Linear(16, 64), *[Residual(64) for _ in range(4)], nn.Linear(64, 1)).to(device)
    engine = zerotune.ZeroEngine(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        knobs=zerotune.Knobs(release=options.release),
        clip_norm=1.0,
    )

    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank sees other data
    for step in range(options.steps):
        x = torch.randn(32, 16, generator=generator).to(device)
        y = torch.sin(x.sum(dim=1, keepdim=True))
        engine.backward(nn.functional.mse_loss(engine(x), y))
        result = engine.step()
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}  loss {result.loss:.4f}  gradient norm {result.grad_norm:.3f}")

    state = engine.full_state_dict()  # the plain model's state_dict; collective, so every rank calls it
    if dist.get_rank() == 0:
        print(f"{sum(t.numel() for t in state.values()):,} parameters in {len(state)} tensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Draw the pictures of the documentation: ``make figures``.

A small GPT is trained for a few steps on two ranks of this machine; the ledger of one steady step is kept in
``docs/figures/step.json``, and the pictures are drawn from it and from the slicing itself.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import zerotune
from zerotune.config.schema import GptConfig
from zerotune.models.gpt import Gpt
from zerotune.records import Ledger
from zerotune.report.pictures import LANES, broadcast_owners, partition_cells, timeline

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
RANKS = 2
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
LANE_COLORS = {"compute": "#9ecae9", "all_gather": "#f58518", "reduce_scatter": "#54a24b"}
LANE_NAMES = {"compute": "compute", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}


def _train(rank: int, store: str, target: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Gpt(GptConfig(layers=4, d_model=256, heads=4, vocab_size=256, sequence_length=64))
    engine = zerotune.ZeroEngine(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        zerotune.Knobs(param_persistence_threshold=0),
    )
    for step in range(6):
        if step == 5:
            engine.begin_ledger()
        tokens = torch.randint(256, (4, 65))
        logits = engine(tokens[:, :-1])
        engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        engine.step()
    ledger = engine.end_ledger()
    if rank == 0:
        Path(target).write_text(ledger.model_dump_json())
    dist.destroy_process_group()


def record(path: Path) -> None:
    """Train on two ranks and write rank 0's ledger of one step."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_train, args=(f"{folder}/store", str(path)), nprocs=RANKS)


def draw_partition(numel: int = 180, ranks: int = 4) -> None:
    """One parameter of 10 x 18, flattened, padded and split."""
    cells = partition_cells(numel, ranks)
    width = len(cells) // ranks
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 4.2), height_ratios=(1.4, 1))
    rows, columns = 10, numel // 10
    for cell in cells[:numel]:
        row, column = divmod(cell.position, columns)
        top.add_patch(plt.Rectangle((column, rows - 1 - row), 1, 1, fc=COLORS[cell.rank], ec="white", lw=0.8))
    top.set(xlim=(-3, columns + 18), ylim=(-0.4, rows + 0.4), aspect="equal")
    top.text(
        columns + 0.8, rows / 2, f"one parameter, {rows} x {columns}\ncolour: the rank that owns the element\n"
        "slices cut across rows: storage is split\ninside the layer, not by layers", va="center",
    )  # fmt: skip
    top.axis("off")
    for cell in cells:
        bottom.add_patch(
            plt.Rectangle(
                (cell.position % width, ranks - 1 - cell.rank), 1, 0.8,
                fc="white" if cell.is_padding else COLORS[cell.rank], ec=COLORS[cell.rank], lw=0.8,
                hatch="////" if cell.is_padding else None,
            )
        )  # fmt: skip
    for rank in range(ranks):
        bottom.text(-0.6, ranks - 0.6 - rank, f"rank {rank}", ha="right", va="center")
    bottom.text(
        width / 2, -0.5, f"each rank keeps one contiguous slice of {width} elements (a multiple of 16); hatched: padding",
        ha="center", va="top",
    )  # fmt: skip
    bottom.set(xlim=(-7, width + 0.5), ylim=(-1.2, ranks))
    bottom.axis("off")
    _save(figure, "partition")


def draw_timeline(ledger: Ledger) -> None:
    """AllGather, compute, release and ReduceScatter of one real step."""
    step = timeline(ledger)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 5), height_ratios=(1.6, 1), sharex=True)
    for bar in step.bars:
        lane = len(LANES) - 1 - LANES.index(bar.lane)
        shade = 1.0 if bar.detail != "backward" or bar.lane != "compute" else 0.6
        top.barh(
            lane, (bar.end_s - bar.begin_s) * 1e3, left=bar.begin_s * 1e3, height=0.62, alpha=shade,
            color=LANE_COLORS[bar.lane], edgecolor="white", linewidth=0.6,
        )  # fmt: skip
    for time_s, _ in step.releases:
        top.plot(time_s * 1e3, len(LANES) - 1 - 0.42, marker="v", color="#d62728", markersize=5)
    top.plot([], [], "v", color="#d62728", label="release")
    top.legend(loc="upper right", frameon=False)
    top.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in reversed(LANES)])
    top.set_title(
        "One step of a GPT of 4 blocks on 2 ranks (rank 0): gathers run beside compute, gradients go to the shards"
    )
    bottom.step(
        [t * 1e3 for t, _ in step.live], [b / 2**20 for _, b in step.live], where="post", color="#4c78a8"
    )
    bottom.set(xlabel="ms", ylabel="full parameters alive, MiB")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, "timeline")


def draw_broadcast(layers: int = 16, ranks: int = 4) -> None:
    """The layer-broadcast picture, marked as what does not happen."""
    owners = broadcast_owners(layers, ranks)
    figure, axis = plt.subplots(figsize=(9, 3))
    for layer, rank in enumerate(owners):
        axis.add_patch(plt.Rectangle((layer, rank * 0), 0.9, 1, fc=COLORS[rank], alpha=0.55))
        axis.text(layer + 0.45, 0.5, str(layer), ha="center", va="center")
    for rank in range(ranks):
        first = owners.index(rank)
        axis.text(first + layers / ranks / 2, 1.25, f"owned by rank {rank}", ha="center")
    axis.plot([0, layers], [-0.15, 1.15], color="#d62728", lw=3)
    axis.plot([0, layers], [1.15, -0.15], color="#d62728", lw=3)
    axis.text(
        layers / 2, -0.65, "NOT what ZeRO-3 does: whole layers dealt out to ranks and broadcast", ha="center",
        color="#d62728", weight="bold",
    )  # fmt: skip
    axis.set(xlim=(-0.3, layers + 0.3), ylim=(-1.0, 1.6))
    axis.axis("off")
    _save(figure, "not-by-layers")


def _save(figure: plt.Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    figure.savefig(Path(tempfile.gettempdir()) / f"{name}.png", dpi=90)
    plt.close(figure)
    print(f"docs/figures/{name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--keep-ledger", action="store_true", help="draw from the recorded step, train nothing"
    )
    options = parser.parse_args()
    matplotlib.rcParams.update({"svg.hashsalt": "zerotune", "font.size": 9})
    path = FOLDER / "step.json"
    if not options.keep_ledger:
        record(path)
    draw_partition()
    draw_timeline(Ledger.model_validate_json(path.read_text()))
    draw_broadcast()


if __name__ == "__main__":
    main()

"""Make the committed benchmark: every engine on three links, as JSON, one table and one picture.

Run it on a quiet machine with two cores and the right to make network namespaces; it takes about a quarter of an hour::

    python scripts/reference_bench.py [--rounds 8] [--set model.gpt.d_model=512] [--name gpt-34m]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "results" / "reference"
LINKS = {"2 Gbit/s": "2gbit", "500 Mbit/s": "500mbit", "loopback": None}
ENGINES = (
    "zerotune",
    "zerotune:keep",
    "fsdp2",
    "fsdp2:keep",
    "fsdp2:async",
    "ddp",
    "deepspeed",
    "deepspeed:scaled",
)


def measure(name: str, link: str | None, rounds: int, sets: list[str], reuse: bool) -> dict[str, Any]:
    """One benchmark, or what an earlier one left if that is to be reused; returns its document."""
    where = link or "loopback"
    command = [
        *(sys.executable, "-m", "zerotune", "bench", str(ROOT / "examples" / "bench.yaml"), "--json"),
        *("--engines", ",".join(ENGINES), "--variant", "keep=zero.release=keep"),
        *("--rounds", str(rounds)),
        *(("--link", link) if link else ("--address", "local")),
        *(word for text in sets for word in ("--set", text)),
    ]
    path = FOLDER / f"{name}-{where}.json"
    if reuse and path.exists():
        document: dict[str, Any] = json.loads(path.read_text())
        return document
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    document = json.loads(done.stdout)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def table(name: str, documents: dict[str, dict[str, Any]]) -> str:
    """One row per engine, one column per link."""
    first = next(iter(documents.values()))
    lines = [
        f"# {name}",
        "",
        f"{first['parameters']:,} parameters, fp32, {first['ranks']} ranks, {first['backend']}, {first['device']}, "
        f"{first['rounds']} rounds of {first['steps_per_round']} steps in turns; {platform.processor() or platform.machine()}, "
        f"{datetime.now(UTC):%Y-%m-%d}.",
        "Step time in ms, and the paired ratio of `zerotune` to it with its 95 % interval (below 1: `zerotune` is faster).",
        "",
        "| engine | " + " | ".join(documents) + " | peak memory |",
        "|---|" + "---|" * (len(documents) + 1),
    ]
    for engine in first["engines"]:
        cells = [_cell(engine, document) for document in documents.values()]
        peak = first["engines"][engine]["peak_memory_bytes"]
        cells.append(f"{peak / 2**20:.1f} MiB" if peak else "")
        lines.append(f"| {engine} | " + " | ".join(cells) + " |")
    limits = [document["ratios"]["zerotune/limit"] for document in documents.values()]
    lines.append("| zerotune over its own limit | " + " | ".join(_ratio(r) for r in limits) + " | |")
    return "\n".join(lines) + "\n"


def picture(documents: dict[str, dict[str, Any]], path: Path) -> None:
    """Step times of every engine on every link, with their intervals, and the limit of each."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(documents), figsize=(13, 4), layout="constrained")
    for axis, (title, document) in zip(axes, documents.items(), strict=True):
        names = list(document["engines"])
        rows = [document["engines"][name] for name in names]
        times = [row["step_time_s"] * 1e3 for row in rows]
        low = [t - row["step_time_ci"][0] * 1e3 for t, row in zip(times, rows, strict=True)]
        high = [row["step_time_ci"][1] * 1e3 - t for t, row in zip(times, rows, strict=True)]
        colours = ["#2a6f97" if name.startswith("zerotune") else "#adb5bd" for name in names]
        axis.barh(names, times, xerr=[low, high], color=colours)
        axis.plot([row["limit_s"] * 1e3 for row in rows], names, "k|", markersize=14)
        axis.invert_yaxis()
        axis.set_title(title)
        axis.set_xlabel("ms per step; the mark is the engine's own limit")
    figure.savefig(path)
    plt.close(figure)


def _cell(engine: str, document: dict[str, Any]) -> str:
    time = f"{document['engines'][engine]['step_time_s'] * 1e3:.0f}"
    ratio = document["ratios"].get(f"zerotune/{engine}")
    return time if ratio is None else f"{time}, {_ratio(ratio)}"


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--name", default="gpt-10m")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--reuse", action="store_true", help="measure only what is not there yet")
    options = parser.parse_args()
    documents = {
        title: measure(options.name, link, options.rounds, options.sets, options.reuse)
        for title, link in LINKS.items()
    }
    text = table(options.name, documents)
    (FOLDER / f"{options.name}.md").write_text(text + f"\n![step times]({options.name}.svg)\n")
    picture(documents, FOLDER / f"{options.name}.svg")
    print(text)


if __name__ == "__main__":
    main()

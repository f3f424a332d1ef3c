"""What the scripts of ``results/reference/`` have in common: measuring, keeping what was measured, and writing it down.

Every one of them runs ``zerotune bench`` and keeps its documents, by link, in one JSON file beside the table and the
picture that it makes of them; with ``--reuse`` only what is not there yet is measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerotune.config.load import load_job
from zerotune.models.build import build_model
from zerotune.records import Interval

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "results" / "reference"
JOB = ROOT / "examples" / "bench.yaml"

LINKS = {"2gbit": "2 Gbit/s", "500mbit": "500 Mbit/s", "loopback": "loopback"}
"""As ``--links`` and the JSON have them, and in words."""

STEPS = 3
"""Steps of one measurement."""

_STEP_S = {"2gbit": 0.7, "500mbit": 1.4, "loopback": 0.8}
"""About what a step of the 10.5 M model takes, for the estimate of a duration alone."""

_MORE_STEPS = 7
"""Steps of an engine beside the rounds: warming up, ledgers, memory."""

_START_S = 15.0

Document = dict[str, Any]
"""What ``zerotune bench --json`` prints."""


@dataclass(frozen=True)
class Benchmark:
    """One ``zerotune bench`` per link.

    Attributes:
        engines: Names, ``zerotune`` first.
        variants: What ``zerotune:NAME`` sets, by NAME.
        sets: Further ``--set`` options, for all engines.
        by_link: Variants of one link.
        steps: Of one measurement; fewer bring those that are compared closer together in time.
        size: Step time of the model in that of the 10.5 M one, about.
    """

    engines: tuple[str, ...]
    variants: Mapping[str, str] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    size: float = 1.0
    by_link: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    steps: int = STEPS

    def seconds(self, links: Sequence[str], rounds: int) -> float:
        """About how long it takes."""
        steps = (len(self.engines) + 1) * (rounds * (self.steps + 1) + _MORE_STEPS)
        return sum(_START_S + steps * self.size * _STEP_S[link] for link in links)

    def variants_on(self, link: str) -> dict[str, str]:
        """Those of every link, and its own."""
        return {**self.variants, **self.by_link.get(link, {})}

    def engines_on(self, link: str) -> list[str]:
        """Those that are measured there: a variant only if the link has it."""
        ours, _, _ = self.engines[0].partition(":")
        variants = self.variants_on(link)
        return [
            each
            for each in self.engines
            if each == ours or not each.startswith(f"{ours}:") or each.partition(":")[2] in variants
        ]

    def run(self, link: str, rounds: int) -> Document:
        """Measure on one link."""
        variants, engines = self.variants_on(link), self.engines_on(link)
        command = [
            *(sys.executable, "-m", "zerotune", "bench", str(JOB), "--json"),
            *("--engines", ",".join(engines), "--rounds", str(rounds), "--steps", str(self.steps)),
            *(("--address", "local") if link == "loopback" else ("--link", link)),
            *(word for name, what in variants.items() for word in ("--variant", f"{name}={what}")),
            *(word for text in self.sets for word in ("--set", text)),
        ]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        document: Document = json.loads(done.stdout)
        return document | {"measured": f"{datetime.now(UTC):%Y-%m-%d}"}


def parser(description: str | None, rounds: int, links: Sequence[str]) -> argparse.ArgumentParser:
    """The options that every script has.

    Args:
        description: The script's docstring.
        rounds: The default of ``--rounds``.
        links: The default of ``--links``.
    """
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=rounds, help=f"default: {rounds}")
    options.add_argument(
        "--links",
        type=_links,
        default=list(links),
        help=f"some of {', '.join(LINKS)}; default: {','.join(links)}",
    )
    options.add_argument("--reuse", action="store_true", help="measure only what is not there yet")
    options.add_argument(
        "--folder", type=Path, default=FOLDER, help="where to write; default: results/reference"
    )
    return options


def _links(text: str) -> list[str]:
    links = text.split(",")
    unknown = [link for link in links if link not in LINKS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no link {unknown[0]}; take some of {', '.join(LINKS)}")
    return links


def measure(
    benchmarks: Mapping[str, Benchmark], path: Path, links: Sequence[str], rounds: int, reuse: bool
) -> dict[str, dict[str, Document]]:
    """Measure benchmarks on links, keeping each document as soon as it is there.

    Args:
        benchmarks: By name.
        path: JSON file of the documents, by benchmark and link. Those of other links stay in it.
        links: Where to measure.
        rounds: Times that each engine is measured.
        reuse: Whether to measure only what the file does not hold, or not all engines of.

    Returns:
        The documents of these benchmarks and links.
    """
    kept: dict[str, dict[str, Document]] = json.loads(path.read_text()) if path.exists() else {}
    missing = {
        name: [link for link in links if not (reuse and _holds(kept.get(name, {}), benchmark, link))]
        for name, benchmark in benchmarks.items()
    }
    seconds = sum(benchmarks[name].seconds(left, rounds) for name, left in missing.items())
    if seconds:
        print(f"about {max(1, round(seconds / 60))} min", file=sys.stderr)
    for name, left in missing.items():
        for link in left:
            print(
                f"{name}, {LINKS[link]}: about {benchmarks[name].seconds([link], rounds):.0f} s",
                file=sys.stderr,
            )
            kept.setdefault(name, {})[link] = benchmarks[name].run(link, rounds)
            path.write_text(json.dumps(kept, indent=1) + "\n")
    return {name: {link: kept[name][link] for link in links} for name in benchmarks}


def _holds(documents: Mapping[str, Document], benchmark: Benchmark, link: str) -> bool:
    return link in documents and documents[link]["engines"].keys() >= set(benchmark.engines_on(link))


def meta_model(sets: Sequence[str]) -> nn.Module:
    """The model of :data:`JOB` with further ``--set`` options, without memory."""
    with torch.device("meta"):
        return build_model(load_job(JOB, list(sets)).job.model, 0)


def label(document: Document) -> str:
    """What the figures are of."""
    return (
        f"{document['parameters']:,} parameters, fp32, {document['ranks']} ranks, {document['backend']}, "
        f"{document['device']}, {document['rounds']} rounds of {document['steps_per_round']} steps in turns; "
        f"{platform.processor() or platform.machine()}, {document['measured']}."
    )


def row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def head(columns: Sequence[str]) -> list[str]:
    """The head of a Markdown table."""
    return [row(columns), f"|{'---|' * len(columns)}"]


def ratio(interval: Mapping[str, float]) -> str:
    """``0.950 [0.932, 0.968]``."""
    return f"{interval['median']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def shown(interval: Interval) -> str:
    """The same of an interval that was worked out here."""
    return ratio({"median": interval.value, "low": interval.low, "high": interval.high})


def mebibytes(amount: float | None) -> str:
    return "" if amount is None else f"{amount / 2**20:.1f} MiB"


def errors(figures: Document) -> tuple[float, float, float]:
    """Step time and what its interval reaches below and above it, ms."""
    time = figures["step_time_s"]
    low, high = figures["step_time_ci"]
    return time * 1e3, (time - low) * 1e3, (high - time) * 1e3


def publish(folder: Path, name: str, text: str, picture: str | None) -> None:
    """Write a table with its picture below it, if it has one, and print it."""
    below = f"\n![{picture}]({name}.svg)\n" if picture else ""
    (folder / f"{name}.md").write_text(text + below)
    print(text)

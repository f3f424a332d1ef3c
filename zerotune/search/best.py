"""``best.yaml``: the winner as a model.yaml of its own, every value written out."""

from __future__ import annotations

from pathlib import Path

import humanize

from zerotune.config.dump import dump_job
from zerotune.records import RunRecord
from zerotune.records.events import SearchResult

FILE_NAME = "best.yaml"


def write_best(folder: Path, result: SearchResult) -> Path:
    """Write the winning configuration of a search.

    It can be given to ``launch --config``, and is a whole model.yaml by itself.

    Args:
        folder: Where; an older file is replaced at once or not at all.
        result: The finished search.

    Returns:
        Its path.

    Raises:
        OSError: It cannot be written.
    """
    path = folder / FILE_NAME
    partial = folder / f".{FILE_NAME}.partial"
    partial.write_text(best_text(result), encoding="utf-8")
    partial.replace(path)
    return path


def best_text(result: SearchResult) -> str:
    """The text of the file: comments that say where it comes from, then the configuration."""
    return dump_job(result.best.config, header=_origin(result.best, result))


def _origin(best: RunRecord, result: SearchResult) -> list[str]:
    assert best.measurement is not None
    facts = best.cluster.facts
    measured = result.confirmed[0] if result.confirmed else best.measurement
    how = f" in {result.confirmed[0].rounds} rounds in turns" if result.confirmed else ""
    lines = [
        f"The best of {sum(result.counts.values())} trials of study {result.study}: run {best.run_id}.",
        f"Measured {best.created:%Y-%m-%d %H:%M} UTC on {facts['nodes']} x {facts['ranks_per_node']} ranks,"
        f" {facts['device']}{how}:",
        f"{measured.tokens_per_second.value:,.0f} tokens/s, {measured.step_time_s.value * 1e3:.1f} ms a step,"
        f" peak {humanize.naturalsize(best.measurement.peak_memory_bytes, binary=True, format='%.1f')} per rank.",
    ]
    if best.is_baseline:
        lines.append("These are the defaults.")
    elif result.speedup is not None:
        ratio = result.speedup
        lines.append(
            f"Speed-up over the defaults: {ratio.value:.3f} (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"
            + (", a tie." if result.is_tie else ".")
        )
    else:
        lines.append("The defaults do not fit, so there is no speed-up.")
    lines.append(f"Train with it: zerotune launch --config {FILE_NAME}")
    return lines

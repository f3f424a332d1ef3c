"""Rows of a ranking as CSV: one line a run, figures in base units, every knob a column."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from zerotune.config.knobs import REGISTRY
from zerotune.report.differences import knob_values
from zerotune.report.format import setting
from zerotune.report.json_view import row_document
from zerotune.report.ranking import Row

_FIGURES = (
    "run_id",
    "rank",
    "pareto",
    "is_winner",
    "kind",
    "study",
    "trial_number",
    "is_baseline",
    "status",
    "feasible",
    "tokens_per_second",
    "tokens_per_second_low",
    "tokens_per_second_high",
    "step_time_s",
    "step_time_s_low",
    "step_time_s_high",
    "peak_memory_bytes",
    "memory_budget",
    "speedup",
    "speedup_low",
    "speedup_high",
    "speedup_is_paired",
    "rounds_in_turns",
    "tokens_per_second_in_turns",
    "final_loss",
    "steps",
    "created",
    "workload",
    "cluster",
)


def csv_text(rows: Iterable[Row]) -> str:
    """A header and one line a row. What is not known is empty."""
    knobs = {info.path: name for name, info in REGISTRY.items()}
    file = io.StringIO()
    writer = csv.DictWriter(file, [*_FIGURES, *knobs.values()], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        values = {knobs[path]: setting(value) for path, value in knob_values(row.run.config).items()}
        writer.writerow(_flat(row_document(row)) | values)
    return file.getvalue()


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    """Intervals as two columns, fingerprints as their keys, booleans as in model.yaml."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if name.endswith("_ci"):
            stem = name.removesuffix("_ci")
            flat[f"{stem}_low"], flat[f"{stem}_high"] = value or (None, None)
        elif name == "in_turns":
            for inner in ("rounds", "tokens_per_second"):
                flat[f"{inner}_in_turns"] = value[inner] if value else None
        elif name in ("workload", "cluster"):
            flat[name] = value["key"]
        else:
            flat[name] = setting(value) if isinstance(value, bool) else value
    return flat

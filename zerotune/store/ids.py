"""Names of runs."""

from __future__ import annotations

import secrets

from zerotune.records import RunKind

_LETTERS = {RunKind.TRIAL: "t", RunKind.CONFIRMATION: "c", RunKind.LAUNCH: "l", RunKind.BENCH: "b"}


def new_run_id(kind: RunKind) -> str:
    """A new short name, e.g. ``t-3f9a1c02`` for a trial: short enough to type, random enough not to repeat."""
    return f"{_LETTERS[kind]}-{secrets.token_hex(4)}"

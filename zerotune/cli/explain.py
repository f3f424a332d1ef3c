"""``zerotune explain``: why a run takes the time and the memory that it does."""

from __future__ import annotations

from typing import Annotated

import typer

from zerotune.cli.console import print_json, print_parts
from zerotune.cli.options import Json, StoreOption
from zerotune.cli.reading import open_store
from zerotune.config.errors import UsageError


def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or the beginning of one.")],
    as_json: Json = False,
    store: StoreOption = None,
) -> None:
    """Explain a run from the ledger of one of its steps: what stands out, and which knob would change it."""
    from zerotune.report.explain import explain as explanation_of
    from zerotune.report.explain_text import explanation_parts

    with open_store(store) as opened:
        record = opened.get_run(run)
        ledgers = opened.ledgers(record.run_id)
    explanation = explanation_of(ledgers)
    if explanation is None:
        raise UsageError(
            f"run {record.run_id} has no ledger: it ended as {record.status} before one was recorded",
            "explain a run that is complete",
        )
    if as_json:
        print_json({"run_id": record.run_id, **explanation.model_dump(mode="json")})
    else:
        print_parts(explanation_parts(explanation))

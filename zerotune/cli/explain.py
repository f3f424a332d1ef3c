"""``zerotune explain``: why a run takes the time and the memory that it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerotune.cli.console import print_json, print_parts, say
from zerotune.cli.options import Json, StoreOption
from zerotune.cli.reading import open_store
from zerotune.config.errors import UsageError

if TYPE_CHECKING:
    from zerotune.report.page import Explained
    from zerotune.store.store import Store


def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or the beginning of one.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write it as one page with pictures.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write the step as a Chrome trace, to open in Perfetto."
        ),
    ] = None,
    as_json: Json = False,
    store: StoreOption = None,
) -> None:
    """Explain a run from the ledger of one of its steps: what stands out, and which knob would change it."""
    from zerotune.report.explain_text import explanation_parts

    with open_store(store) as opened:
        found = explained(opened, run)
    if found is None:
        raise UsageError(
            f"run {run} has no ledger: it ended before one was recorded", "explain a run that is complete"
        )
    if html is not None:
        from zerotune.report.page import explanation_page

        write(html, explanation_page(found))
    if trace is not None:
        import json

        from zerotune.report.chrome_trace import chrome_trace

        write(trace, json.dumps(chrome_trace(found.ledgers)))
    if as_json:
        print_json({"run_id": found.run_id, **found.explanation.model_dump(mode="json")})
    else:
        print_parts(explanation_parts(found.explanation))


def explained(store: Store, run: str) -> Explained | None:
    """A run with its explanation, or ``None`` if it has no ledger."""
    from zerotune.report.explain import explain as explanation_of
    from zerotune.report.headline import headline
    from zerotune.report.page import Explained

    record = store.get_run(run)
    ledgers = store.ledgers(record.run_id)
    explanation = explanation_of(ledgers)
    if explanation is None:
        return None
    return Explained(record.run_id, headline(record), ledgers, explanation)


def write(path: Path, text: str) -> None:
    """Write a file that the user named.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    say(f"wrote {path}")

"""Running the commands that read the store, without the other commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from tests.builders import make_config, make_confirmed, make_ledger, make_run, make_study
from zerotune.config.errors import ZerotuneError
from zerotune.records import RunRecord, StudyRecord
from zerotune.store.store import Store


@dataclass(frozen=True)
class Answer:
    """What a command printed; ``error`` is what the command line would print as a line before it exits."""

    stdout: str
    stderr: str
    error: ZerotuneError | None

    @property
    def exit_code(self) -> int:
        return 0 if self.error is None else int(self.error.exit_code)


def run_command(command: Callable[..., Any], *arguments: str) -> Answer:
    """Run one command as the command line does; anything but a :class:`ZerotuneError` is a fault of ours."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    error = result.exception
    if error is not None and not isinstance(error, ZerotuneError):
        raise error
    return Answer(result.stdout, result.stderr, error)


def fill(path: Path, runs: list[RunRecord], studies: list[StudyRecord] | None = None) -> str:
    """Write a store and return its path, as ``--store`` takes it."""
    with Store.open(f"sqlite:///{path}") as store:
        for study in studies or []:
            store.add_study(study)
        for run in runs:
            store.add_run(run)
            store.save_ledgers(run.run_id, [make_ledger(0), make_ledger(1)])
    return str(path)


def demo_study() -> StudyRecord:
    """The study of :func:`demo_runs`."""
    faster = make_confirmed("t-22222222", 1.25, baseline=3040.0)
    return make_study(
        best=faster.run_id,
        speedup=faster.speedup,
        confirmed=[faster, make_confirmed("t-11111111", 1.0, 0.0, baseline=3040.0)],
    )


def demo_runs() -> list[RunRecord]:
    """A baseline, a winner that is confirmed, a run over the budget and one out of memory."""
    return [
        make_run("t-11111111", 4000.0, number=0, is_baseline=True, feasible=True),
        make_run("t-22222222", 5000.0, number=1, config=make_config(release="keep"), feasible=True),
        make_run("t-33333333", 9000.0, number=2, config=make_config(8), feasible=False, memory_budget=10**8),
        make_run("t-44444444", None, number=3),
    ]

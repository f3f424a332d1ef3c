"""What a driver that was killed left as running."""

from __future__ import annotations

import os
from pathlib import Path

from tests.builders import make_run
from zerotune.records import RunKind, Status
from zerotune.runs.owner import this_owner
from zerotune.runs.reap import open_reaped
from zerotune.store.location import file_url
from zerotune.store.store import Store


def test_whoever_opens_the_store_to_run_something_is_told_what_was_broken_off(tmp_path: Path) -> None:
    url = file_url(tmp_path / "zerotune.db")
    nobody = f"{os.uname().nodename}:{2**22 + 7}:1.0"
    with Store.open(url) as store:
        for kind, run_id, study in (
            (RunKind.LAUNCH, "l-dead", None),
            (RunKind.BENCH, "b-dead", None),
            (RunKind.TRIAL, "t-dead", "demo"),
        ):
            left = {"kind": kind, "study": study, "number": 3 if study else None}
            store.add_run(make_run(run_id, None, status=Status.RUNNING, owner=nobody, **left))
        store.add_run(make_run("l-mine", None, status=Status.RUNNING, owner=this_owner()))
    lines: list[str] = []
    with open_reaped(url, lines.append) as store:
        statuses = {run.run_id: run.status for run in store.runs()}
    assert statuses == {
        "l-dead": Status.INTERRUPTED,
        "b-dead": Status.INTERRUPTED,
        "t-dead": Status.INTERRUPTED,
        "l-mine": Status.RUNNING,
    }
    said = "is interrupted: its driver process ended without finishing it"
    assert sorted(lines) == [
        f"run b-dead {said}",
        f"run l-dead {said}",
        f"run t-dead, trial 3 of demo, {said}",
    ]
    with open_reaped(url, lines.append):
        assert len(lines) == 3  # said once

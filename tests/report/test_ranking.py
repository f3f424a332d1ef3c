"""Rows, tables and documents of a ranking."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from rich.console import Console
from rich.table import Table

from tests.builders import (
    MIB,
    make_config,
    make_confirmed,
    make_ledger,
    make_measurement,
    make_run,
    make_study,
    make_workload,
)
from zerotune.config.schema import JobConfig
from zerotune.records import Interval, RunKind, RunRecord, Status
from zerotune.report.csv_view import csv_text
from zerotune.report.describe import describe_run
from zerotune.report.differences import Difference
from zerotune.report.json_view import results_document, run_document, show_document
from zerotune.report.ledgers import summarise
from zerotune.report.printing import print_whole
from zerotune.report.ranking import choose, rank_rows
from zerotune.report.tables import changes_text, outcomes, ranked_table, table_of_launches, table_of_left_out

STUDY = make_study(
    best="t-win",
    speedup=Interval(value=1.2, low=1.15, high=1.25),
    confirmed=[
        make_confirmed("t-win", 1.2, rounds=3, baseline=3000.0).model_copy(
            update={"speedup": Interval(value=1.2, low=1.15, high=1.25)}
        ),
        make_confirmed("t-base", 1.0, 0.0, rounds=3, baseline=3000.0),
    ],
)
"""In turns the machine is slower than it was during the trials."""


def sample_runs() -> list[RunRecord]:
    keep = make_config(prefetch_distance=0, release="keep", overlap_comm=False)
    return [
        make_run("t-base", 4000.0, number=0, is_baseline=True, feasible=True),
        make_run("t-win", 5000.0, number=1, config=keep, feasible=True),
        make_run(
            "t-lean", 4700.0, number=2, config=make_config(1), peak_memory_bytes=100 * MIB, feasible=True
        ),
        make_run("t-fat", 9000.0, number=3, feasible=False, memory_budget=10 * MIB),
        make_run("t-oom", None, number=4),
        make_run("t-lost", None, number=5, status=Status.LOST_NODE),
        make_run("t-now", None, number=6, status=Status.RUNNING),
        make_run("l-one", 4900.0, kind=RunKind.LAUNCH, study=None, checkpoint="/checkpoints/step-13"),
        *[make_run(f"c-{i}", 5000.0, kind=RunKind.CONFIRMATION, number=1) for i in range(3)],
    ]


def many_knobs() -> list[RunRecord]:
    """The same with more text than fits beside the figures."""
    far = make_config(
        prefetch_distance=0,
        release="keep",
        overlap_comm=False,
        allgather_bucket_size=1_578_496,
        param_persistence_threshold=789,
        reduce_bucket_size=3_156_992,
    )
    changed = ("t-win", "t-fat")
    return [run.model_copy(update={"config": far}) if run.run_id in changed else run for run in sample_runs()]


def printed(table: Table, columns: int = 80, terminal: bool = False) -> str:
    file = io.StringIO()
    print_whole(Console(file=file, width=columns, force_terminal=terminal, color_system=None), table)
    return file.getvalue()


class TestRows:
    def test_ranked_first_then_all_others(self):
        rows = rank_rows(sample_runs(), [STUDY])
        assert [row.run.run_id for row in rows] == [
            *("t-win", "t-lean", "t-base"),
            *("l-one", "t-fat", "t-oom", "t-lost", "t-now"),
        ]
        assert [row.rank for row in rows] == [1, 2, 3, None, None, None, None, None]

    def test_the_winner(self):
        winner = rank_rows(sample_runs(), [STUDY])[0]
        assert winner.is_winner
        assert winner.confirmations == 3
        assert winner.speedup == STUDY.speedup and winner.is_paired
        assert winner.tokens_per_second is not None and winner.tokens_per_second.value == 3600
        assert winner.step_time_s is not None and winner.step_time_s.value == pytest.approx(1024 / 3600)
        assert [change.name for change in winner.changes] == ["prefetch_distance", "release", "overlap_comm"]

    def test_the_others_have_unpaired_speedups(self):
        lean = rank_rows(sample_runs(), [STUDY])[1]
        assert lean.speedup is not None and not lean.is_paired
        assert lean.tokens_per_second is not None and lean.tokens_per_second.value == 4700
        assert lean.speedup.value == pytest.approx(4700 / 4000)
        assert lean.speedup.low < 4700 / 4000 < lean.speedup.high

    @pytest.mark.parametrize("baseline", [{"feasible": False}, {"tokens_per_second": None}])
    def test_a_baseline_that_does_not_fit(self, baseline):
        options = {"tokens_per_second": 4000.0} | baseline
        runs = [
            make_run("t-base", number=0, is_baseline=True, **options),
            make_run("t-1", 1000.0, number=1, config=make_config(1)),
            make_run("t-2", 2000.0, number=2),
        ]
        rows = rank_rows(runs, [make_study(best="t-2")])
        assert [row.reference and row.reference.run_id for row in rows[:2]] == ["t-1", "t-1"]
        assert rows[0].speedup is not None and rows[0].speedup.value == pytest.approx(2)
        assert [row.baseline_speedup for row in rows[:2]] == [None, None]
        assert [change.name for change in rows[1].changes] == ["micro_batch_size"]
        text = printed(ranked_table(runs))
        assert "no feasible baseline: speeds are relative to t-1" in text
        assert "vs reference" in text

    def test_nothing_succeeded(self):
        runs = [make_run(f"t-{n}", None, number=n, is_baseline=n == 0) for n in range(3)]
        rows = rank_rows(runs)
        assert [row.rank for row in rows] == [None, None, None]
        assert choose(rows) == []
        assert "3 oom_device" in printed(table_of_left_out(rows))

    def test_workloads_are_never_mixed(self):
        with pytest.raises(ValueError, match="different workloads"):
            rank_rows([make_run("t-1"), make_run("t-2", workload=make_workload("llama"))])

    def test_choice(self):
        rows = rank_rows(sample_runs(), [STUDY])
        assert [row.run.run_id for row in choose(rows, top=2)] == ["t-win", "t-lean"]
        assert [row.run.run_id for row in choose(rows, pareto=True)] == ["t-win", "t-lean"]
        assert [row.run.run_id for row in choose(rows)] == ["t-win", "t-lean", "t-base"]

    def test_by_memory(self):
        rows = rank_rows(sample_runs(), [STUDY], sort="memory")
        assert [row.run.run_id for row in choose(rows)] == ["t-lean", "t-win", "t-base"]


class TestTables:
    def test_every_figure_says_how_it_was_measured(self):
        lines = printed(ranked_table(sample_runs(), studies=[STUDY])).splitlines()
        cells = {line.split()[1]: line for line in lines if line.strip()[:1] in ("1", "2", "3")}
        for figure in ("3,600", "[3,564, 3,636]", "284.4", "200.0 MiB", "+20.0 % [15.0, 25.0]", "in turns"):
            assert figure in cells["t-win"], figure
        assert "(winner, on the Pareto front)" in " ".join(lines)
        for figure in ("4,700", "[4,653, 4,747]", "217.9", "+17.5 % [15.9, 19.2]", "once"):
            assert figure in cells["t-lean"], figure
        for figure in ("3,000", "baseline", "in turns", "(the baseline)"):
            assert figure in cells["t-base"], figure
        assert any(line.startswith("in turns: measured again side by side in 3 rounds") for line in lines)
        assert any(line.startswith("once: the trial alone") for line in lines)

    def test_without_a_confirmation_there_is_nothing_to_tell_apart(self):
        text = printed(ranked_table(sample_runs()))
        assert "measured" not in text and "in turns" not in text

    @pytest.mark.parametrize("terminal", [True, False])
    @pytest.mark.parametrize("columns", [60, 80, 100, 120, 140, 160, 200])
    def test_figures_stay_whole_and_lines_fit(self, columns, terminal, monkeypatch):
        monkeypatch.setenv("COLUMNS", str(columns))
        runs = many_knobs()
        for table in (ranked_table(runs, studies=[STUDY]), table_of_left_out(rank_rows(runs, [STUDY]))):
            text = printed(table, columns, terminal)
            assert "…" not in text
            if columns >= 80:
                assert max(len(line) for line in text.splitlines()) <= columns
            if not terminal:
                assert all(line == line.rstrip() for line in text.split("\n"))
            for knob in ("prefetch_distance=0", "param_persistence_threshold=789", "overlap_comm=false"):
                assert knob in text
        text = printed(ranked_table(runs, studies=[STUDY]), columns, terminal)
        for figure in ("3,600", "200.0 MiB", "+20.0 % [15.0, 25.0]", "in turns", "+17.5 % [15.9, 19.2]"):
            assert figure in text, figure
        assert ("284.4" in text) == (columns >= 100), "step times say the same as tokens/s, and go first"
        assert ("[3,564, 3,636]" in text) == (columns >= 100)

    def test_piped_it_is_160_columns_wide(self, monkeypatch):
        monkeypatch.delenv("COLUMNS", raising=False)
        lines = printed(ranked_table(many_knobs(), studies=[STUDY])).splitlines()
        assert 140 < max(len(line) for line in lines) <= 160

    def test_who_is_left_out_and_why(self):
        text = printed(table_of_left_out(rank_rows(sample_runs(), [STUDY])))
        assert "over the memory budget of 10.0 MiB" in text
        assert "rank 1 in backward: cannot allocate 512.0 MiB" in text
        for status in ("oom_device", "lost_node", "running"):
            assert f"1 {status}" in text

    def test_launches(self):
        text = printed(table_of_launches(rank_rows(sample_runs(), [STUDY])))
        assert "l-one" in text and "2.5000" in text and "/checkpoints/step-13" in text
        assert table_of_launches(rank_rows([make_run()])) is None

    def test_other_versions_are_noted(self):
        runs = [make_run("t-1", versions={"torch": "2.13"}), make_run("t-2", versions={"torch": "2.14"})]
        assert "different versions of torch: 2.13, 2.14" in printed(ranked_table(runs))

    def test_names_are_not_markup(self):
        run = make_run("t-1", study="[red]x", failure=None)
        assert "[red]x" in printed(ranked_table([run, make_run("t-2", study="y")]))

    def test_outcomes(self):
        assert outcomes(sample_runs()[:5]) == "3 complete, 1 over the memory budget, 1 oom_device"


class TestDocuments:
    def test_the_keys_programs_rely_on(self):
        document = run_document(make_run("t-1", 4000.0))
        assert list(document)[:3] == ["run_id", "status", "tokens_per_second"]
        assert set(document) == {
            *("run_id", "status", "tokens_per_second", "step_time_s", "peak_memory_bytes", "config"),
            *(
                "tokens_per_second_ci",
                "step_time_s_ci",
                "final_loss",
                "steps",
                "steady_steps",
                "stopped_because",
            ),
            *(
                "checkpoint",
                "kind",
                "study",
                "trial_number",
                "is_baseline",
                "feasible",
                "memory_budget",
                "failure",
            ),
            *("created", "ended", "workload", "cluster", "versions", "run_dir"),
        }
        row = results_document(rank_rows([make_run("t-1", 4000.0)]))["runs"][0]
        assert set(row) - set(document) == {
            *("rank", "is_tied", "pareto", "is_winner", "confirmations", "speedup", "speedup_ci", "changes"),
            *("speedup_is_paired", "in_turns"),
        }

    def test_what_was_measured_in_turns(self):
        win, lean, base = results_document(rank_rows(sample_runs(), [STUDY]))["runs"][:3]
        assert (win["speedup"], win["speedup_ci"], win["speedup_is_paired"]) == (1.2, [1.15, 1.25], True)
        assert win["tokens_per_second"] == 5000, "what the trial itself measured"
        assert (win["in_turns"]["rounds"], win["in_turns"]["tokens_per_second"]) == (3, 3600)
        assert win["in_turns"]["step_time_s"] == pytest.approx(1024 / 3600)
        assert (base["speedup"], base["speedup_is_paired"]) == (1.0, True)
        assert (lean["in_turns"], lean["speedup_is_paired"]) == (None, False)

    def test_the_configuration_is_whole(self):
        run = make_run("t-1", config=make_config(release="keep"))
        assert JobConfig.model_validate(json.loads(json.dumps(run_document(run)))["config"]) == run.config

    def test_no_measurement_is_null(self):
        document = run_document(make_run("t-1", None))
        assert document["status"] == "oom_device"
        for key in ("tokens_per_second", "step_time_s", "peak_memory_bytes", "final_loss"):
            assert document[key] is None

    def test_no_number_is_null(self):
        run = make_run().model_copy(update={"measurement": make_measurement(final_loss=math.nan)})
        assert run_document(run)["final_loss"] is None
        json.dumps(run_document(run), allow_nan=False)

    def test_show_has_the_ledger(self):
        document = show_document(make_run(), [make_ledger(0), make_ledger(1)])
        assert document["ledger"]["ranks"] == 2
        assert document["ledger"]["collectives"][0]["count"] == 3
        assert len(document["memory_by_rank"]) == 2
        assert show_document(make_run("t-1", None), [])["ledger"] is None

    def test_csv(self):
        rows = rank_rows(sample_runs(), [STUDY])
        read = list(csv.DictReader(io.StringIO(csv_text(rows))))
        assert [line["run_id"] for line in read] == [row.run.run_id for row in rows]
        assert read[0]["release"] == "keep"
        assert float(read[0]["tokens_per_second"]) == 5000
        assert float(read[0]["speedup_low"]) == 1.15
        assert [line["speedup_is_paired"] for line in read[:3]] == ["true", "false", "true"]
        assert (read[0]["rounds_in_turns"], read[1]["rounds_in_turns"]) == ("3", "")
        assert float(read[0]["tokens_per_second_in_turns"]) == 3600
        assert next(line for line in read if line["run_id"] == "t-oom")["tokens_per_second"] == ""


def test_a_ledger_is_summed_over_collectives_and_is_the_slowest_over_ranks():
    slow = make_ledger(1)
    slow = slow.model_copy(
        update={
            "collectives": [
                entry.model_copy(update={"done_s": entry.done_s + 0.001}) for entry in slow.collectives
            ]
        }
    )
    summary = summarise([make_ledger(0), slow])
    assert summary is not None
    assert [(each.kind.value, each.purpose, each.count) for each in summary.collectives] == [
        ("all_gather", "forward", 3),
        ("all_gather", "backward", 3),
        ("reduce_scatter", "gradient", 3),
    ]
    assert summary.collectives[0].exposed_s == pytest.approx(3 * 0.003)
    assert summary.collectives[0].sent_bytes == 3 * 790_528 * 2
    assert summarise([]) is None


def test_a_run_is_described_from_its_record_alone():
    file = io.StringIO()
    console = Console(file=file, width=80)
    runs = sample_runs()
    for part in describe_run(runs[1], [make_ledger()], runs[0]) + describe_run(runs[4]):
        print_whole(console, part) if isinstance(part, Table) else console.print(part)
    text = file.getvalue()
    for words in (
        "5,000 [4,950, 5,050]",
        "200.0 MiB, 200.0 MiB by rank",
        "cannot allocate 512.0 MiB",
        "logs/rank1.log",
        "lower train.micro_batch_size",
        "reduce_scatter",
        "1,581,056 elements",
    ):
        assert words in text, words
    changed = [line.split()[0] for line in text.splitlines() if line.rstrip().endswith("changed")]
    assert changed == ["zero.prefetch_distance", "zero.release", "zero.overlap_comm"]


def test_a_distance_of_backward_that_follows_is_not_named() -> None:
    forward = Difference("zero.prefetch_distance", 4, 0)
    release = Difference("zero.release", "after_use", "keep")
    follows, apart = (Difference("zero.backward_prefetch_distance", 8, after) for after in (0, 2))
    assert changes_text([forward, follows, release]) == "prefetch_distance=0 release=keep"
    assert changes_text([forward, apart]) == "prefetch_distance=0 backward_prefetch_distance=2"
    assert changes_text([apart]) == "backward_prefetch_distance=2"

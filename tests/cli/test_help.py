"""The command line as a whole: fast help, exit codes, and no traceback for anyone."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zerotune
from zerotune.cli.main import COMMANDS, load_command, run
from zerotune.config import space

HEAVY = ("torch", "ray", "optuna", "sqlalchemy", "numpy")
_LOADED = f"""
import sys
from zerotune.cli.main import run
code = run(sys.argv[1:])
found = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imported {{found}}" if found else code)
"""


def zt(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zerotune", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["search", "--help"], ["launch", "-h"], ["knobs"], ["spaces"], ["init"]],
    ids=" ".join,
)
def test_loads_nothing_heavy(args: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *args],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_help_is_fast() -> None:
    """Processor time, the least of a few runs: the machine may be busy with other things."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert zt("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.5


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_command(name).name == name
    assert run([name, "-h"]) == 0
    assert f"zerotune {name} [OPTIONS]" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([flag]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"\b{command}\b", text) for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"zerotune {zerotune.__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serach"], "error: No such command 'serach'. Did you mean 'search'? (see zerotune --help)\n"),
        (
            ["knobs", "--jsno"],
            "error: No such option: --jsno (Possible options: --json) (see zerotune knobs --help)\n",
        ),
        (["init", "a", "b"], "error: Got unexpected extra argument(s) (b) (see zerotune init --help)\n"),
        (["show"], "error: Missing argument 'RUN' (see zerotune show --help)\n"),
    ],
)
def test_usage_errors_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message)


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    captured = capsys.readouterr()
    assert "Usage:" in captured.out and captured.err == ""


def test_configuration_errors_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("knobs:\n  prefech_distance: [1]\n  release: [keep, 5]\nx: 1\n")
    assert run(["spaces", str(file)]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and len(lines) == 2
    assert (
        lines[0]
        == f"error: {file}:2:3: knobs.prefech_distance: no such knob, did you mean prefetch_distance?"
    )


def raise_it(error: BaseException) -> object:
    def fail() -> None:
        raise error

    return fail


def test_an_error_of_ours_names_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platformdirs.user_log_dir", lambda name: str(tmp_path / name))
    monkeypatch.setattr(space, "list_spaces", raise_it(RuntimeError("first\nsecond")))
    assert run(["spaces"]) == 1
    line = capsys.readouterr().err
    found = re.fullmatch(r"error: internal error: RuntimeError: first; details in (.*)\n", line)
    assert found
    log = Path(found[1]).read_text()
    assert "zerotune spaces" in log and "Traceback" in log and "second" in log


def test_interrupts_end_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(space, "list_spaces", raise_it(KeyboardInterrupt()))
    assert run(["spaces"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    monkeypatch.setattr(space, "list_spaces", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(["spaces"]) == 143
    assert capsys.readouterr().err == "error: terminated\n"


def test_a_closed_pipe_is_quiet() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "zerotune", "knobs"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("typed", "offered"), [("zerotune s", ["search", "show", "spaces"]), ("zerotune knobs --j", ["--json"])]
)
def test_completion(typed: str, offered: list[str]) -> None:
    words = {"_ZEROTUNE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "zerotune"],
        env={**os.environ, **words},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == offered

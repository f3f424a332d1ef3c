"""The command line: one function per command, and whatever ends a command turned into an exit code."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import zerotune
from zerotune.cli.console import error
from zerotune.cli.interrupts import interruptible
from zerotune.config.errors import ConfigErrors, ExitCode, ZerotuneError

COMMANDS = {
    "init": "Write a short, commented model.yaml.",
    "search": "Measure configurations on the cluster and rank them.",
    "launch": "Train with the best configuration known.",
    "bench": "Measure engines in turns: ours, DDP, FSDP2, DeepSpeed.",
    "results": "Show the ranked runs, any time later.",
    "show": "Show one run in full.",
    "compare": "Compare two runs, and say whether they differ by more than noise.",
    "explain": "Say why a run takes its time and memory, and which knob would change it.",
    "export": "Write the configuration of a run, ready for use elsewhere.",
    "knobs": "Explain what can be tuned.",
    "spaces": "List the search spaces, or what is in one.",
}
"""Commands in the order of the help, each with its line there. ``zerotune.cli.NAME`` has the function ``NAME``."""


class _Ended(Exception):
    """A signal or a closed pipe ended the command; carried past typer, which would end it in its own way."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class _Group(TyperGroup):
    """Imports a command's module only when that command is run: the help of all of them loads none."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise _Ended(getattr(interrupt, "exit_code", ExitCode.INTERRUPTED)) from None
        except BrokenPipeError:
            raise _Ended(ExitCode.RUN_FAILED) from None


def load_command(name: str) -> Any:
    """Import a command and read its options from its function's annotations."""
    function = getattr(import_module(f"zerotune.cli.{name}"), name)
    alone = typer.Typer(add_completion=False)
    alone.command(name)(function)
    return typer.main.get_command(alone)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zerotune {zerotune.__version__}")
        raise typer.Exit


def _zerotune(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """Find the ZeRO-3 configuration that trains your model fastest on your cluster, and train with it."""


app = typer.Typer(
    name="zerotune",
    cls=_Group,
    callback=_zerotune,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with the documented code.

    Args:
        args: The command line without the name of the program; that of the process by default.
    """
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        args: The command line without the name of the program; that of the process by default.

    Returns:
        The exit code. Whatever goes wrong is told on stderr: a mistake of the user's in one line each, an error of
        ours with the name of the file that holds the traceback.
    """
    try:
        with interruptible():
            command = typer.main.get_command(app)
            result = command.main(args, prog_name="zerotune", standalone_mode=False)
            sys.stdout.flush()
        return result if isinstance(result, int) else ExitCode.OK
    except _Ended as end:
        return _say_end(end.exit_code)
    except KeyboardInterrupt as interrupt:
        return _say_end(getattr(interrupt, "exit_code", ExitCode.INTERRUPTED))
    except BrokenPipeError:
        return _say_end(ExitCode.RUN_FAILED)
    except ConfigErrors as problem:
        for line in problem.lines:
            error(line)
        return problem.exit_code
    except ZerotuneError as problem:
        error(_with_log(problem, args))
        return problem.exit_code
    except typer.Abort:
        error("aborted")
        return ExitCode.RUN_FAILED
    except typer.TyperException as problem:
        return _say_usage(problem)
    except Exception as problem:
        error(f"internal error: {_one_line(problem)}; details in {_write_log(args)}")
        return ExitCode.RUN_FAILED


def _say_end(exit_code: int) -> int:
    if exit_code == ExitCode.INTERRUPTED:
        error("interrupted")
    elif exit_code == ExitCode.TERMINATED:
        error("terminated")
    else:  # whoever read our output has gone: say nothing, and keep the interpreter from flushing into the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code


def _say_usage(problem: typer.TyperException) -> int:
    message = problem.format_message().strip()
    if message:
        context = getattr(problem, "ctx", None)
        where = context.command_path if context is not None else "zerotune"
        error(f"{message.rstrip('.')} (see {where} --help)")
    return problem.exit_code


def _one_line(problem: Exception) -> str:
    first = str(problem).strip().partition("\n")[0]
    return f"{type(problem).__name__}: {first}" if first else type(problem).__name__


def _with_log(problem: ZerotuneError, args: Sequence[str] | None) -> str:
    """The line for an error. Where it promises a traceback in the log, as for a user's factory, the log is written.

    An error of a rank has no cause here: its traceback is in that rank's log, which the line names.
    """
    if problem.__cause__ is None or "traceback" not in (problem.remedy or ""):
        return str(problem)
    return f"{problem.message} (the whole traceback is in {_write_log(args)})"


def _write_log(args: Sequence[str] | None) -> Path:
    """Write the traceback of the exception at hand to a file of its own and return its path."""
    import platformdirs

    now = datetime.now()
    command = shlex.join(["zerotune", *(sys.argv[1:] if args is None else args)])
    text = f"zerotune {zerotune.__version__}, {now.isoformat(timespec='seconds')}\n{command}\n\n{traceback.format_exc()}"
    name = f"error-{now:%Y%m%d-%H%M%S}-{os.getpid()}.log"
    for folder in (Path(platformdirs.user_log_dir("zerotune")), Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        except OSError:
            continue
        return folder / name
    sys.stderr.write(text)
    return Path("the lines above")

"""Errors that are the user's to mend: one line with the place and the remedy, and the documented exit code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2
    RESOURCES = 3
    PREFLIGHT = 4
    NOTHING_FEASIBLE = 5
    INTERRUPTED = 130
    TERMINATED = 143


class ZerotuneError(Exception):
    """Base of the errors that reach a user as a line, never as a traceback.

    Args:
        message: What is wrong and where, one line.
        remedy: What to do about it, one line or none.
    """

    exit_code: ExitCode = ExitCode.RUN_FAILED

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class UsageError(ZerotuneError):
    """A wrong command line, configuration, file or store."""

    exit_code = ExitCode.USAGE


class ConfigErrors(UsageError):
    """All that is wrong with a configuration, at once.

    Args:
        lines: One line per error, each with its place and remedy.
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class ResourceError(ZerotuneError):
    """The cluster cannot give what was asked for."""

    exit_code = ExitCode.RESOURCES


class PreflightError(ZerotuneError):
    """The cluster was reached, but is not fit to run on."""

    exit_code = ExitCode.PREFLIGHT


class NothingFeasible(ZerotuneError):
    """No configuration meets the memory budget."""

    exit_code = ExitCode.NOTHING_FEASIBLE


class RunFailed(ZerotuneError):
    """A run was started and did not end well."""

    exit_code = ExitCode.RUN_FAILED

"""Where the store is: what the user says, else the project's folder, else the user's data folder."""

from __future__ import annotations

import os
from pathlib import Path

from zerotune.config.errors import UsageError

ENVIRONMENT_VARIABLE = "ZEROTUNE_STORE"
FILE_NAME = "zerotune.db"


def store_url(option: str | None = None) -> str:
    """The URL of the store to use. Nothing is created.

    Args:
        option: What ``--store`` was given: a URL or the path of a file.

    Returns:
        URL: of ``option``, else of ``$ZEROTUNE_STORE``, else of ``results/runs/zerotune.db`` if the current folder
        is a project (it has a model.yaml or a results folder), else of the user's data folder.

    Raises:
        UsageError: The path is empty.
    """
    if option is not None:
        return _as_url(option, "--store")
    if (variable := os.environ.get(ENVIRONMENT_VARIABLE)) is not None:
        return _as_url(variable, f"${ENVIRONMENT_VARIABLE}")
    here = Path.cwd()
    if (here / "model.yaml").is_file() or (here / "results").is_dir():
        return file_url(here / "results" / "runs" / FILE_NAME)

    import platformdirs

    return file_url(Path(platformdirs.user_data_dir("zerotune", appauthor=False)) / FILE_NAME)


def file_url(path: Path) -> str:
    """The URL of an SQLite database in a file."""
    return f"sqlite:///{path.expanduser().absolute()}"


def _as_url(text: str, origin: str) -> str:
    if not text.strip():
        raise UsageError(f"{origin} is empty", "give the path of a file or a database URL")
    return text if "://" in text else file_url(Path(text))

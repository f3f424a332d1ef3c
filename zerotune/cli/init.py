"""``zerotune init``: a commented model.yaml to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerotune.config.errors import UsageError
from zerotune.config.template import MODEL_YAML


def init(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="File to write, or a folder.")] = Path(
        "model.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Write a short, commented model.yaml."""
    if path.is_dir():
        path = path / "model.yaml"
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(MODEL_YAML)
    except FileExistsError:
        raise UsageError(
            f"{path} is there already", "give --force to overwrite it, or another path"
        ) from None
    except FileNotFoundError:
        raise UsageError(
            f"{path} cannot be written: there is no folder {path.parent}", "make it first"
        ) from None
    except OSError as problem:
        raise UsageError(f"{path} cannot be written: {problem.strerror}", "give another path") from None
    typer.echo(f"wrote {path}; next: zerotune search {path}")

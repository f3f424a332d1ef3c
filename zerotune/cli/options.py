"""Options that more than one command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PLACEMENT = "Placement"

ModelFile = Annotated[Path, typer.Argument(metavar="[MODEL.yaml]", help="What to train.", show_default=True)]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes", min=1, help="Nodes to use; the whole cluster by default.", rich_help_panel=_PLACEMENT
    ),
]
ProcsPerNode = Annotated[
    int | None,
    typer.Option(
        "--procs-per-node",
        min=1,
        help="Ranks on each node; one per GPU by default, or cluster.procs_per_node.",
        rich_help_panel=_PLACEMENT,
    ),
]
LocalNodes = Annotated[
    int | None,
    typer.Option(
        "--local-nodes",
        min=1,
        help="Start so many Ray nodes on this machine, for trying.",
        rich_help_panel=_PLACEMENT,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Ray cluster to join; without it the one that runs here.",
        rich_help_panel=_PLACEMENT,
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="FILE|URL", help="Where results are kept; $ZEROTUNE_STORE otherwise."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=v", help="Replace a value of MODEL.yaml; may be repeated."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

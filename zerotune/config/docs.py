"""Writes the documentation pages of the knobs from the registry: ``python -m zerotune.config.docs``."""

from __future__ import annotations

import sys
from pathlib import Path

from zerotune.config.knobs import REGISTRY, KnobInfo

_GENERATED = "<!-- Written by `python -m zerotune.config.docs` from zerotune/config/knobs.py; edit that. -->"
_INDEX = "README.md"


def pages() -> dict[str, str]:
    """Every page by name of file."""
    return {_INDEX: _index(), **{f"{name}.md": _page(info) for name, info in REGISTRY.items()}}


def write(folder: Path) -> None:
    """Write all pages and remove those of knobs that are no more."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for old in folder.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")


def _index() -> str:
    rows = [
        f"| [`{info.path}`]({info.name}.md) | {info.default} | {info.unit} | {info.meaning} |"
        for info in REGISTRY.values()
    ]
    return "\n".join(
        [
            _GENERATED,
            "",
            "# Knobs",
            "",
            "A knob moves time and memory and never the mathematics. Sizes are in elements: `5e7` or `50M`.",
            "",
            "| knob | default | unit | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _page(info: KnobInfo) -> str:
    rows = [f"| {label} | {value} |" for label, value in info.details()]
    return "\n".join(
        [
            _GENERATED,
            "",
            f"# {info.name}",
            "",
            f"{info.meaning[0].upper()}{info.meaning[1:]}.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            "In model.yaml:",
            "",
            "```yaml",
            f"{info.section}:",
            f"  {info.name}: {info.example}",
            "```",
            "",
            f"On the command line: `--set {info.path}={info.example}`",
            "",
        ]
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/knobs"))

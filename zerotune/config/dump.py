"""Writes a configuration as a model.yaml that reads back equal."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from zerotune.config.schema import JobConfig
from zerotune.config.section import Section


def dump_job(job: JobConfig, header: Sequence[str] = ()) -> str:
    """Write a configuration as YAML.

    Every default is written out, so that a later version with other defaults reads the same; what is none, such as the
    kinds of model that were not chosen, is left out.

    Args:
        job: The configuration.
        header: Lines to put above it as comments.

    Returns:
        A text that :func:`~zerotune.config.load.load_job` reads back equal to ``job``.
    """
    yaml = YAML(typ="rt")
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.width = 4096  # no folding: a long path stays on its line
    out = StringIO()
    for line in "\n".join(header).splitlines():
        out.write(f"# {_printable(line)}".rstrip() + "\n")
    if header:
        out.write("\n")
    for name in JobConfig.model_fields:
        yaml.dump({name: _plain(getattr(job, name))}, out)
    return out.getvalue()


def _plain(section: Section) -> dict[str, Any]:
    """Fields in the order of the schema; ``None`` means "not given" for every field that may be it."""
    written: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            written[name] = _plain(value)
        elif value is not None:
            written[name] = _quoted(section.model_dump(mode="json", include={name})[name])
    return written


def _quoted(value: Any) -> Any:
    """Texts with characters that YAML takes for line breaks, or does not show, in quotes with escapes."""
    if isinstance(value, str):
        return value if value.isprintable() else DoubleQuotedScalarString(value)
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if isinstance(value, dict):
        return {_quoted(key): _quoted(item) for key, item in value.items()}
    return value


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else " " for char in line)

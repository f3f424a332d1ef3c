"""``--set a.b=value``: one value of model.yaml, replaced from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerotune.config.section import Section, child_section
from zerotune.config.source import KeyPath, Place, Problem, Source, parse_yaml

_HOW = "write --set section.key=value, for example --set zero.prefetch_distance=5e6"


def apply_sets(source: Source, sets: Sequence[str], root: type[Section]) -> None:
    """Put the values of ``--set`` options into ``source``, later ones over earlier ones.

    Args:
        source: What the file says; changed in place. What is wrong with an option is added to its problems.
        sets: Each ``a.b=value``, the value in YAML.
        root: Schema of the file, which knows what a bare text such as ``optimizer: adamw`` stands for.
    """
    for number, option in enumerate(sets, start=1):
        place = Place(1, number, 1, f"--set {option}")
        name, equals, text = option.partition("=")
        keys: KeyPath = tuple(part.strip() for part in name.split("."))
        if not equals:
            source.problems.append(Problem(place, "", f"has no '='; {_HOW}"))
        elif not all(keys):
            source.problems.append(Problem(place, "", f"has an empty name before '='; {_HOW}"))
        else:
            value, problem = _read_value(text, place, ".".join(keys))
            if problem is not None:
                source.problems.append(problem)
            else:
                _put(source, keys, value, place, root)


def _read_value(text: str, place: Place, path: str) -> tuple[Any, Problem | None]:
    """Read a value as YAML, so that ``[a, b]``, ``5e7``, ``null`` and quotes mean what they mean in the file."""
    parsed = parse_yaml(text, place.text)
    if not parsed.problems:
        return parsed.data, None
    if text.lstrip()[:1] not in ("[", "{", '"', "'", "!", "&"):
        return text, None  # a text that YAML has other plans for, such as the pattern **/*.py
    message = parsed.problems[0].message
    return None, Problem(place, path, f"the value is {message}" if message.startswith("not ") else message)


def _put(source: Source, keys: KeyPath, value: Any, place: Place, root: type[Section]) -> None:
    if source.data is None:
        source.data = {}
    here, section = source.data, root
    for depth, key in enumerate(keys):
        path = keys[: depth + 1]
        last = depth == len(keys) - 1
        if isinstance(here, list):
            if not (key.isdigit() and int(key) < len(here)):
                message = f"there is no item {key}; the list has {len(here)}"
                source.problems.append(Problem(place, ".".join(keys), message))
                return
            key = int(key)
            keys = (*path[:-1], key, *keys[depth + 1 :])
            path = keys[: depth + 1]
        inner_section = child_section(section, key)
        if last:
            source.forget(path)
            source.keys[path] = source.values[path] = place
            here[key] = value
            return
        inner = here[key] if isinstance(here, list) else here.get(key)
        if isinstance(inner, str) and inner_section is not None and inner_section.shorthand is not None:
            inner = {inner_section.shorthand: inner}
            source.values[(*path, inner_section.shorthand)] = source.place(path)
        if not isinstance(inner, (dict, list)):
            source.forget(path)
            source.keys[path] = source.values[path] = place
            inner = {}
        here[key] = inner
        here, section = inner, inner_section or Section

"""Turns pydantic's errors into sentences that name the key, what is wrong and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zerotune.config.knobs import REGISTRY, find_knob
from zerotune.config.planned import PLANNED_KEYS, PLANNED_VALUES
from zerotune.config.section import Section, exactly_one_of, section_class
from zerotune.config.source import KeyPath, Problem, Source, dotted
from zerotune.config.units import parse_bytes, parse_duration

_EXAMPLES = {"model": "model: {gpt: {}}", "factory": "factory: path/to/file.py:function"}


def explain(errors: list[ErrorDetails], source: Source, root: type[Section]) -> list[Problem]:
    """Say what pydantic found wrong, in plain sentences.

    Args:
        errors: Of one validation of ``source.data`` against ``root``.
        source: What was validated, with its places.
        root: The schema.

    Returns:
        One problem for each error; a key that is missing only because it was misspelt is told once.
    """
    problems: list[Problem] = []
    meant: set[KeyPath] = set()
    for error in errors:
        if error["type"] == "extra_forbidden":
            section, path, _ = _locate(error["loc"], root)
            message, suggestion = unknown_key(section, path, error["loc"][len(path)], root)
            path = (*path, error["loc"][len(path)])
            problems.append(source.problem(path, message, at_key=True))
            if suggestion is not None:
                meant.add((*path[:-1], suggestion))
    seen: set[tuple[KeyPath, str]] = set()
    for error in errors:
        section, path, field = _locate(error["loc"], root)
        if error["type"] == "extra_forbidden":
            continue
        if error["type"] == "missing" and isinstance(path[-1], str):
            if path not in meant:
                problems.append(source.problem(path, _missing(path, field), at_key=True))
            continue
        if error["type"] == "invalid_key":
            key_path = (*path, error["input"])
            problems.append(source.problem(key_path, "a key must be a word; quote it", at_key=True))
            continue
        if error["type"] == "missing":
            path = path[:-1]  # a list that is too short
        message = _sentence(error, path, field) if field else _not_a_mapping(error["input"], root)
        if (path, message) not in seen:
            seen.add((path, message))
            problems.append(source.problem(path, message))
    return problems


def check_alternatives(source: Source, root: type[Section], found: list[Problem]) -> list[Problem]:
    """Problems with sections that take exactly one of several, which pydantic does not reach past other errors."""
    problems = []
    known = {problem.path for problem in found} | {
        problem.path.partition(".")[0] for problem in source.problems
    }
    for name, field in root.model_fields.items():
        section = section_class(field.annotation)
        data = source.data.get(name) if isinstance(source.data, dict) else None
        if section is None or not section.exactly_one or not isinstance(data, dict) or name in known:
            continue
        given = [kind for kind in section.model_fields if data.get(kind) is not None]
        misspelt = any(kind not in section.model_fields for kind in data)
        if len(given) > 1 or (not given and not misspelt):
            problems.append(source.problem((name,), exactly_one_of(list(section.model_fields), given)))
    return problems


def unknown_key(
    section: type[Section], where: KeyPath, key: Any, root: type[Section]
) -> tuple[str, str | None]:
    """What to say of a key that ``section`` does not have, and the key that was probably meant.

    Args:
        section: Schema of the section.
        where: Path of the section.
        key: The key found.
        root: Schema of the whole file, in which the key may have another place.
    """
    fields = list(section.model_fields)
    text = str(key)
    in_zero = where == ("zero",)
    what = "knob" if where in (("zero",), ("knobs",)) else "key"
    if where in (("zero",), ("train",)) and text in PLANNED_KEYS:
        return f"not available yet; {PLANNED_KEYS[text]}", None
    if text in REGISTRY and root.model_fields.get(REGISTRY[text].section):
        return f"no such {what}, {text} stands under {REGISTRY[text].section}:", None
    if in_zero and (knob := find_knob(text)):
        return f"no such knob, it is called {knob.name} here", knob.name
    if close := get_close_matches(text, fields, n=1, cutoff=0.7):
        knob_meant = close[0] in REGISTRY and where in (("zero",), ("train",))
        return f"no such {'knob' if knob_meant else what}, did you mean {close[0]}?", close[0]
    if elsewhere := _places_of(text, root):
        return f"no such {what}, {text} stands under {' or '.join(elsewhere)}", None
    if where in ((), ("zero",), ("train",)) and (close := get_close_matches(text, REGISTRY, n=1, cutoff=0.8)):
        return f"no such knob, did you mean {REGISTRY[close[0]].path}?", None
    if close := get_close_matches(text, fields, n=1, cutoff=0.55):
        return f"no such {what}, did you mean {close[0]}?", close[0]
    return f"no such {what}; there are {', '.join(fields)}", None


def _places_of(key: str, section: type[Section], path: KeyPath = (), most: int = 3) -> list[str]:
    """Sections in which ``key`` stands, as ``train.optimizer:``; none if there are too many to be a hint."""
    found = []
    for name, field in section.model_fields.items():
        if name == key:
            found.append(f"{dotted(path)}:" if path else "the top level")
        if (inner := section_class(field.annotation)) is not None:
            found += _places_of(key, inner, (*path, name))
    return found if len(found) <= most else []


def _locate(
    loc: tuple[int | str, ...], root: type[Section]
) -> tuple[type[Section], KeyPath, FieldInfo | None]:
    """Follow pydantic's location through the schema.

    Returns:
        The innermost section, the path as far as it is one in the file, and the field at its end.
    """
    section: type[Section] = root
    field: FieldInfo | None = None
    for depth, step in enumerate(loc):
        if field is None or section_class(field.annotation) is not None:
            section = section_class(field.annotation) or section if field is not None else section
            if not isinstance(step, str) or step not in section.model_fields:
                return section, loc[:depth], field
            field = section.model_fields[step]
        elif not (isinstance(step, int) or _is_mapping(field)):
            return section, loc[:depth], field
    return section, loc, field


def _is_mapping(field: FieldInfo) -> bool:
    return any(get_origin(kind) is dict for kind in (field.annotation, *get_args(field.annotation)))


def _missing(path: KeyPath, field: FieldInfo | None) -> str:
    name = str(path[-1])
    example = _EXAMPLES.get(name)
    how = f"for example `{example}`" if example else wanted(field) if field else "it has no default"
    return f"is missing; add it, {how}"


def _not_a_mapping(value: Any, root: type[Section]) -> str:
    return f"{show(value)} is not a mapping; the file has the sections {', '.join(root.model_fields)}"


def _sentence(error: ErrorDetails, path: KeyPath, field: FieldInfo) -> str:
    kind, value = error["type"], error["input"]
    context: Mapping[str, Any] = error.get("ctx", {})
    planned, instead = PLANNED_VALUES.get(dotted(path), ((), ""))
    if isinstance(value, (int, str)) and not isinstance(value, bool) and value in planned:
        return f"{show(value)} is not available yet; {instead}"
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    if kind == "string_pattern_mismatch" and path[-1:] == ("factory",):
        return f"{show(value)} is not a factory; write module:function or path/to/file.py:function"
    if kind == "string_pattern_mismatch" and path[-1] in REGISTRY:
        return f"{show(value)} is not known here; write {REGISTRY[str(path[-1])].type}"
    if value is None:
        return f"is empty; write {wanted(field)}"
    item = len(path) > 0 and isinstance(path[-1], int)
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"{show(value)} is out of range; write {wanted(field, item)}"
    if kind == "finite_number":
        return f"{show(value)} is not a finite number; write {wanted(field, item)}"
    if kind in ("literal_error", "enum"):
        choices = [str(choice) for choice in _choices(field.annotation)]
        if isinstance(value, (int, float)):
            return f"{show(value)} is out of range; write {one_of(choices)}"
        close = get_close_matches(str(value), choices, n=1, cutoff=0.76)
        hint = f", did you mean {close[0]}?" if close else f"; write {one_of(choices)}"
        return f"{show(value)} is not known here{hint}"
    if kind == "bool_refused":
        return f"{show(value)} is not allowed here; write {wanted(field)}"
    if kind in ("missing", "too_short", "too_long"):
        return f"has the wrong length; write {wanted(field)}"
    if kind.endswith(("_type", "_parsing", "_from_float", "_parsing_size")):
        return f"{show(value)} is not {wanted(field, item)}"
    return error["msg"].replace("Input should", "should")


def show(value: Any, limit: int = 60) -> str:
    """A value as the user wrote it, more or less, and not too long."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, dict):
        text = "a mapping"
    elif isinstance(value, list):
        text = f"[{', '.join(show(item, limit) for item in value)}]"
    elif isinstance(value, float):
        text = {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}.get(str(value), f"{value:g}")
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def wanted(field: FieldInfo, item: bool = False) -> str:
    """What a field takes, in words: ``a whole number of at least 1``.

    Args:
        field: The field.
        item: Whether an item of the list in it is meant.
    """
    annotation = field.annotation
    readers = [reader for meta in field.metadata if (reader := getattr(meta, "func", None)) is not None]
    readers += [reader for part in _union(annotation) for reader in _readers(part)]
    if parse_bytes in readers:
        return "an amount of memory such as 512MiB"
    if parse_duration in readers:
        return "a duration such as 90s or 10m"
    if readers:
        words = [str(choice) for choice in _choices(annotation)]
        return ", or ".join([*words, "a number of elements such as 5e7 or 50M"])
    kind = next(kind for kind in _union(annotation) if kind is not type(None))
    origin, args = get_origin(kind), get_args(kind)
    if item and args:
        kind, origin, args = args[0], get_origin(args[0]), get_args(args[0])
    if choices := _choices(kind):
        return one_of([str(choice) for choice in choices])
    if (section := section_class(kind)) is not None:
        short = f" or the {section.shorthand} alone" if section.shorthand else ""
        return f"a mapping with keys such as {', '.join(list(section.model_fields)[:3])}{short}"
    if kind is bool:
        return "true or false"
    if kind is int:
        return "a whole number" + _bounds(field)
    if kind is float:
        return "a number" + _bounds(field)
    if kind is str:
        return "a text; quote it"
    if origin is tuple:
        return f"a list of {len(args)} numbers, such as {list(field.default)}"
    if origin is list:
        return "a list of values, such as [a, b]"
    if origin is dict:
        return "a mapping of names to values"
    return "another kind of value"


def one_of(choices: list[str]) -> str:
    """``a, b or c``."""
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _union(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _readers(annotation: Any) -> list[Any]:
    """Functions that read an ``Annotated`` kind within a union."""
    return [meta.func for meta in getattr(annotation, "__metadata__", ()) if hasattr(meta, "func")]


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [member.value for member in annotation]
    return [choice for part in _union(annotation) if part is not annotation for choice in _choices(part)]


def _bounds(field: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{word} {bound:g}"
        for meta in field.metadata
        for name, word in words.items()
        if (bound := getattr(meta, name, None)) is not None
    ]
    joined = " and ".join(found)
    return f" of {joined}" if joined.startswith("at ") else f" {joined}" if joined else ""

"""A YAML text with the place of every key and value, so that an error can point at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from zerotune.config.errors import ConfigErrors

KeyPath = tuple[Any, ...]
"""Keys and list positions from the root down to a value."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("null", "bool", "int", "float", "str")}
_TEXTS = {_TAG + name for name in ("timestamp", "value")}  # a date is a text here: no field holds one
_MOST_NODES = 100_000  # aliases of aliases grow without bound ("billion laughs")


@dataclass(frozen=True, order=True)
class Place:
    """Where something was written: in a file, or in a ``--set`` option.

    Attributes:
        rank: 0 in the file, 1 in options, so that problems sort in the order one reads them.
        line: Line from 1, or the number of the option.
        column: Column from 1.
        text: As shown: ``model.yaml:14:3`` or ``--set zero.stage=7``.
    """

    rank: int
    line: int
    column: int
    text: str


@dataclass(frozen=True, order=True)
class Problem:
    """One line of what is wrong.

    Attributes:
        place: Where.
        path: Dotted path of the key, empty if it concerns the whole file.
        message: What is wrong and what to do.
    """

    place: Place
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place.text, self.path, self.message) if part)


def dotted(path: KeyPath) -> str:
    """``("train", "optimizer", "lr")`` as ``train.optimizer.lr``."""
    return ".".join(str(key) for key in path)


@dataclass
class Source:
    """What a YAML text says, in plain Python, and where it says it.

    Attributes:
        name: Name of the file, as the user gave it.
        data: Mappings, lists and scalars; ``None`` if nothing could be read.
        keys: Place of each key.
        values: Place of each value.
        bare: Paths of keys with nothing behind them (``gpt:``), unlike an explicit ``null``.
        problems: What is wrong with the text itself.
    """

    name: str
    data: Any = None
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)
    bare: set[KeyPath] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath, at_key: bool = False) -> Place:
        """Place of a key or value, or of the nearest thing around it that was written."""
        for length in range(len(path), 0, -1):
            where = self.keys if at_key or length < len(path) else self.values
            if (
                found := where.get(path[:length])
                or self.keys.get(path[:length])
                or self.values.get(path[:length])
            ):
                return found
        return Place(0, 1, 1, f"{self.name}:1:1")

    def problem(self, path: KeyPath, message: str, at_key: bool = False) -> Problem:
        """A problem with the value (or key) at ``path``."""
        return Problem(self.place(path, at_key), dotted(path), message)

    def forget(self, path: KeyPath) -> None:
        """Drop the places at and below ``path``, which something else now stands in for."""
        for places in (self.keys, self.values):
            for known in [known for known in places if known[: len(path)] == path]:
                del places[known]
        self.bare = {known for known in self.bare if known[: len(path)] != path}


def read_text(path: Path | str, what: str, if_missing: str) -> str:
    """Read a UTF-8 file.

    Args:
        path: The file.
        what: What should be in it, for messages: ``a model.yaml``.
        if_missing: Remedy when there is no such file.

    Raises:
        ConfigErrors: No such file, a folder, not readable, or not UTF-8 text.
    """
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise ConfigErrors([f"{path}: no such file; {if_missing}"]) from None
    except IsADirectoryError:
        inside = Path(path) / "model.yaml"
        hint = f"did you mean {inside}?" if inside.exists() else f"give the path of {what}"
        raise ConfigErrors([f"{path}: is a folder; {hint}"]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigErrors([f"{path}: cannot be read: {reason}"]) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        message = f"is not UTF-8 text (byte 0x{raw[error.start]:02x}); save it as UTF-8"
        raise ConfigErrors([f"{path}:{line}:{column}: {message}"]) from None


def parse_yaml(text: str, name: str) -> Source:
    """Read a YAML text; what is wrong with it is in ``problems`` of the result, not raised.

    Args:
        text: One YAML document.
        name: Name of the file, for places.
    """
    source = Source(name)
    try:
        root = YAML(typ="safe", pure=True).compose(text)
        if root is not None:
            source.data = _Walker(source).value(root, ())
    except ReaderError as error:
        before = text[: error.position] if isinstance(error.position, int) else ""
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = f"holds a character that YAML does not allow (U+{ord(text[len(before)]):04X}); is this a text file?"
        source.problems.append(Problem(_place(name, line - 1, column - 1), "", message))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line, mark.column) if mark else (0, 0)
        source.problems.append(Problem(_place(name, line, column), "", _syntax_message(error)))
    except RecursionError:
        source.problems.append(Problem(_place(name, 0, 0), "", "is nested too deeply"))
    except (YAMLError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        source.problems.append(Problem(_place(name, 0, 0), "", f"is not valid YAML: {first_line}"))
    return source


def _place(name: str, line: int, column: int) -> Place:
    return Place(0, line + 1, column + 1, f"{name}:{line + 1}:{column + 1}")


def _syntax_message(error: MarkedYAMLError) -> str:
    problem = " ".join((error.problem or "cannot be read").split())
    if "'\\t'" in problem:
        return "a tab is not allowed here; indent with spaces"
    if "another document" in problem:
        return "a second document starts here (---); keep one document in a file"
    if problem == "mapping values are not allowed here":
        return "not valid YAML: a second ':' on this line, or a wrong indentation; quote the text or fix the indentation"
    context = f" {error.context}" if error.context and error.context.startswith("while") else ""
    return f"not valid YAML: {problem}{context}; check brackets, quotes and indentation"


class _Walker:
    """Turns composed nodes into plain Python and notes their places."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.constructor = YAML(typ="safe", pure=True).constructor
        self.open: list[Node] = []
        self.count = 0

    def value(self, node: Node, path: KeyPath) -> Any:
        self.source.values.setdefault(path, self.place(node))
        self.count += 1
        if self.count > _MOST_NODES:
            if self.count == _MOST_NODES + 1:
                self.wrong(node, path, f"more than {_MOST_NODES} values, aliases included")
            return None
        if isinstance(node, ScalarNode):
            return self.scalar(node, path)
        if any(node is outer for outer in self.open):
            return self.wrong(node, path, "contains itself through an alias")
        if str(node.tag) not in (_TAG + "map", _TAG + "seq"):
            return self.wrong(node, path, f"the tag {node.tag} is not understood; remove it")
        self.open.append(node)
        try:
            if isinstance(node, SequenceNode):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            assert isinstance(node, MappingNode)
            return self.mapping(node, path)
        finally:
            self.open.pop()

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        seen: dict[Any, Node] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            if str(key_node.tag) == _TAG + "merge":
                merged.append(value_node)
                continue
            if not isinstance(key_node, ScalarNode):
                self.wrong(key_node, path, "a key must be a word, not a list or a mapping")
                continue
            key = self.scalar(key_node, path)
            below = (*path, key)
            if key in seen:
                first = seen[key].start_mark.line + 1
                place = self.place(key_node)
                message = f"given twice, first on line {first}; remove one of them"
                self.source.problems.append(Problem(place, dotted(below), message))
                continue
            seen[key] = key_node
            self.source.keys[below] = self.place(key_node)
            bare = isinstance(value_node, ScalarNode) and not value_node.value and value_node.style is None
            if bare:
                self.source.bare.add(below)
            if bare or not isinstance(value_node, ScalarNode):
                # Nothing behind a key is placed by YAML where the next key starts, a section where its first key is.
                self.source.values[below] = self.place(key_node)
            result[key] = self.value(value_node, below)
        for value_node in merged:
            self.merge(value_node, path, result)
        return result

    def merge(self, node: Node, path: KeyPath, result: dict[Any, Any]) -> None:
        """``<<: *defaults``: keys that are not written out come from there, and so do their places."""
        for part in node.value if isinstance(node, SequenceNode) else [node]:
            if not isinstance(part, MappingNode):
                self.wrong(part, path, "'<<' takes an alias of a mapping")
                continue
            inner = _Walker(Source(self.source.name))
            inner.open, inner.count = self.open, self.count
            found = inner.value(part, path)
            self.count = inner.count
            self.source.problems += inner.source.problems
            for key in found if isinstance(found, dict) else ():
                if key not in result:
                    result[key] = found[key]
                    self.adopt(inner.source, (*path, key))

    def adopt(self, other: Source, path: KeyPath) -> None:
        for mine, theirs in ((self.source.keys, other.keys), (self.source.values, other.values)):
            mine.update({known: place for known, place in theirs.items() if known[: len(path)] == path})
        self.source.bare |= {known for known in other.bare if known[: len(path)] == path}

    def scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        tag = str(node.tag)
        if tag in _TEXTS:
            return node.value
        if tag not in _SCALARS:
            return self.wrong(node, path, f"the tag {tag} is not understood; remove it")
        try:
            return self.constructor.construct_object(node)
        except (ValueError, KeyError, OverflowError, YAMLError):
            kind = tag.removeprefix(_TAG)
            return self.wrong(node, path, f"{_shorten(node.value)} cannot be read as {kind}")

    def wrong(self, node: Node, path: KeyPath, message: str) -> None:
        self.source.problems.append(Problem(self.place(node), dotted(path), message))

    def place(self, node: Node) -> Place:
        return _place(self.source.name, node.start_mark.line, node.start_mark.column)


def _shorten(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"

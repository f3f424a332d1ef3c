"""Plain text as tokens: bytes, or the pieces of a tokenizer.json."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from zerotune.config.errors import UsageError
from zerotune.config.schema import TextConfig
from zerotune.models.task import Batch, language_batch
from zerotune.train.data.order import EpochOrder

STDLIB = "stdlib"
"""The word in ``data.text.paths`` that stands for the sources of Python's standard library."""

STDLIB_BYTES = 16 * 2**20
"""Of the standard library, whole files are read in sorted order until they make this many bytes."""

_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """All text as one row of tokens, in the order of the files.

    Attributes:
        tokens: 1D, the smallest unsigned integer type that holds the vocabulary.
        vocab_size: Tokens are below it.
        source: Where it came from, for messages.
    """

    tokens: np.ndarray
    vocab_size: int
    source: str


class TextData:
    """Windows of T + 1 tokens, one after the other, in an order shuffled every epoch.

    Args:
        corpus: The text.
        sequence_length: T.
        seed: Seed of the order.
        global_batch_size: Samples per step.

    Raises:
        UsageError: The text is shorter than one window.
    """

    def __init__(self, corpus: Corpus, sequence_length: int, seed: int, global_batch_size: int) -> None:
        # Neighbouring windows share one token: the last target of one is the first input of the next.
        windows = (len(corpus.tokens) - 1) // sequence_length
        if windows < 1:
            raise UsageError(
                f"the text in {corpus.source} has {len(corpus.tokens)} tokens, fewer than one sample of {sequence_length + 1}",
                "give more text or a shorter sequence_length",
            )
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.order = EpochOrder(windows, seed, global_batch_size)

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        starts = [self.order(step, index) * self.sequence_length for index in indices]
        rows = [self.corpus.tokens[start : start + self.sequence_length + 1] for start in starts]
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))
        return language_batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def corpus(config: TextConfig) -> Corpus:
    """Read and tokenise the text; once per process, because one process serves many runs.

    Files that changed since are read again.

    Raises:
        UsageError: A path or the tokenizer does not exist, or there is no text.
    """
    files = tuple(_with_stamp(path) for path in find_files(config))
    tokenizer = None
    if config.tokenizer is not None:
        path = Path(config.tokenizer).expanduser()
        if not path.is_file():
            raise UsageError(
                f"data.text.tokenizer: {config.tokenizer} does not exist", "give a tokenizer.json"
            )
        tokenizer = _with_stamp(path)
    source = ", ".join(config.paths)
    read = _read(files, tokenizer)
    if len(read[0]) == 0:
        raise UsageError(f"data.text: the files in {source} are empty")
    return Corpus(*read, source=source)


def find_files(config: TextConfig) -> list[Path]:
    """The files that ``data.text`` names, each once, in the order of ``paths`` and sorted within each.

    Raises:
        UsageError: One of the paths gives no file.
    """
    files: dict[Path, None] = {}
    for name in config.paths:
        found = (
            list(_stdlib_files()) if name == STDLIB else _files_at(Path(name).expanduser(), config.pattern)
        )
        files.update(dict.fromkeys(found))
    return list(files)


def _files_at(path: Path, pattern: str) -> list[Path]:
    """One file, the files of a folder that match the pattern, or those of a glob."""
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(file for file in path.glob(pattern) if file.is_file())
        if not found:
            raise UsageError(
                f"data.text: no file in folder {path} matches {pattern}",
                "set data.text.pattern, e.g. '**/*.txt'",
            )
        return found
    found = sorted(Path(file) for file in glob.glob(str(path), recursive=True) if os.path.isfile(file))
    if not found:
        kind = "no file matches" if glob.has_magic(str(path)) else "there is no file or folder"
        raise UsageError(
            f"data.text: {kind} {path}",
            f"give files, folders, globs, or {STDLIB}; the current folder is {Path.cwd()}",
        )
    return found


def _stdlib_files() -> Iterator[Path]:
    """The first :data:`STDLIB_BYTES` of the standard library's sources, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    size = 0
    for path in sorted(found):
        size += path.stat().st_size
        if size > STDLIB_BYTES:
            return
        yield path


def _with_stamp(path: Path) -> tuple[str, int, int]:
    """The path with what changes when the file is written."""
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=1)
def _read(
    files: tuple[tuple[str, int, int], ...], tokenizer: tuple[str, int, int] | None
) -> tuple[np.ndarray, int]:
    """Tokens of all files and the size of the vocabulary."""
    if tokenizer is None:
        data = bytearray()
        for path, _, _ in files:
            data += Path(path).read_bytes()
        return np.frombuffer(data, dtype=np.uint8), 256
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(
            "data.text.tokenizer needs tokenizers, which is not installed", "pip install zerotune[hf]"
        ) from error
    try:
        encoder = Tokenizer.from_file(tokenizer[0])
    except Exception as error:
        raise UsageError(f"data.text.tokenizer: {tokenizer[0]} is not a tokenizer.json: {error}") from error
    vocab_size = encoder.get_vocab_size(with_added_tokens=True)
    dtype = np.min_scalar_type(max(vocab_size - 1, 0))
    texts = (Path(path).read_text(encoding="utf-8", errors="replace") for path, _, _ in files)
    return np.concatenate([np.asarray(encoder.encode(text).ids, dtype=dtype) for text in texts]), vocab_size

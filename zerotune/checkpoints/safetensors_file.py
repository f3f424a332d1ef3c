"""Writing a safetensors file tensor by tensor. The library's own writer wants all of them at once.

The format is 8 bytes with the length of a JSON header, the header, then the tensors' bytes one after the other.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import torch

from zerotune.checkpoints.folders import sync_folder
from zerotune.config.errors import UsageError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_CHUNK = 1 << 22
"""Elements converted and written at once, so that another dtype needs no second copy of a tensor."""


@dataclass(frozen=True)
class Entry:
    """A tensor to come.

    Attributes:
        name: In the file.
        shape: Its shape.
        dtype: In the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        numel = 1
        for length in self.shape:
            numel *= length
        return numel

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class SafetensorsWriter:
    """Writes aside and publishes by a rename; leaving it without :meth:`commit` removes what was written.

    Args:
        path: The file to write; an older one is replaced.
        entries: All tensors, in the order in which they will come.
        metadata: Texts for the header.

    Raises:
        UsageError: A dtype that the format does not have.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self._path = path
        self._aside = path.with_name(f".{path.name}.partial")
        self._entries = list(entries)
        self._next = 0
        header = _header(self._entries, metadata)
        self._file: IO[bytes] = open(self._aside, "wb")  # noqa: SIM115 - closed in __exit__
        try:
            self._file.write(header)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def write(self, tensor: torch.Tensor) -> None:
        """Write the next tensor, in the dtype of its entry."""
        entry = self._entries[self._next]
        assert tuple(tensor.shape) == entry.shape, f"{entry.name} is {tuple(tensor.shape)}, not {entry.shape}"
        for chunk in tensor.detach().reshape(-1).split(_CHUNK):
            content = chunk.to("cpu", entry.dtype).contiguous().view(torch.uint8)
            self._file.write(memoryview(content.numpy()))
        self._next += 1

    def commit(self) -> None:
        """Make the file visible, complete."""
        assert self._next == len(self._entries), "every tensor was written"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._aside.rename(self._path)
        sync_folder(self._path.parent)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()  # which may have something to flush, and no room for it
        except OSError:
            if error is None:
                raise
        finally:
            self._aside.unlink(missing_ok=True)


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for entry in entries:
        if entry.dtype not in _NAMES:
            raise UsageError(f"{entry.name} is of {entry.dtype}, which safetensors does not have")
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text

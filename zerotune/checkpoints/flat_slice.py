"""A rank's slice of a flattened tensor, in a form that torch.distributed.checkpoint re-shards by itself."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class FlatSlice(torch.Tensor):
    """The elements ``[offset, offset + length)`` of a flattened tensor of ``total`` elements, without padding.

    What is saved says where each piece lies in the whole, not which rank wrote it, so a checkpoint can be read by any
    number of ranks. It implements torch's checkpointable protocol; its own data is the local piece  # 1D
    """

    offset: int
    total: int

    @staticmethod
    def of(local: torch.Tensor, offset: int, total: int) -> FlatSlice:
        """Wrap a local piece; it shares memory with ``local``, so that loading writes into it.

        Args:
            local: This rank's elements  # 1D
            offset: Where they begin in the whole.
            total: Elements of the whole.
        """
        piece = local.detach().as_subclass(FlatSlice)
        piece.offset = offset
        piece.total = total
        return piece

    @property
    def local(self) -> torch.Tensor:
        """The local piece as a plain tensor  # 1D"""
        return self.as_subclass(torch.Tensor)

    def size(self, dim: int | None = None) -> torch.Size | int:  # type: ignore[override]
        """Size of the whole: what a checkpoint's metadata is compared with."""
        whole = torch.Size([self.total])
        return whole if dim is None else whole[dim]

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.offset]), torch.Size([self.local.numel()]))

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        if self.local.numel() == 0:
            return []
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size([self.offset])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._chunk,
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=cast(torch.Size, self.size()),
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk] if self.local.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.local

"""Tensors of which each rank holds some parts, as checkpoints write and read them.

:class:`Shards` speaks the protocol by which torch.distributed.checkpoint takes objects that are no tensors
(``torch.distributed._checkpointable``, which DTensor and TorchRec's wrappers follow, too): a checkpoint then holds
the whole tensor under one name, cut at any place, and is read into any other cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_tensor_shard


@dataclass(frozen=True)
class Shard:
    """A part that this rank holds.

    Attributes:
        offsets: where it begins in the whole tensor, an index a dimension.
        tensor: its values; shares storage with what it is of.
    """

    offsets: tuple[int, ...]
    tensor: Tensor


class Shards:
    """A tensor over all ranks.

    Attributes:
        shape: of the whole.
        dtype: of every part.
        parts: this rank's, none of them empty; the ranks' parts together are the whole, without overlap.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Shard]) -> None:
        """Leaves out parts without elements, which a rank has where a table has fewer rows than ranks."""
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.parts = tuple(part for part in parts if part.tensor.numel())

    @property
    def device(self) -> torch.device:
        """Of the parts; the CPU where there are none."""
        return self.parts[0].tensor.device if self.parts else torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's parts."""
        return sum(part.tensor.nbytes for part in self.parts)

    def size(self) -> torch.Size:
        """The whole tensor's shape, under the name that torch.distributed.checkpoint asks for."""
        return self.shape

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What this rank writes into a checkpoint."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(part.tensor), size=self.shape
                ),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank reads from a checkpoint."""
        return [ChunkStorageMetadata(torch.Size(part.offsets), part.tensor.shape) for part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The part that begins at ``index``."""
        assert index.offset is not None
        return next(part.tensor for part in self.parts if part.offsets == tuple(index.offset))


Held = Tensor | Shards
"""A tensor as a rank holds it: all of it, or parts."""


class ShardsSavePlanner(DefaultSavePlanner):
    """Plans the writing of tensors and :class:`Shards` by name; the default looks parts up in tensors alone."""

    def __init__(self) -> None:
        """Names are flat."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """What is to be written at ``index``."""
        found: Tensor = find_tensor_shard(self.state_dict[index.fqn], index)
        return found


class ShardsLoadPlanner(DefaultLoadPlanner):
    """Plans the reading into tensors and :class:`Shards` by name."""

    def __init__(self) -> None:
        """Names are flat."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes what is to be filled; the default would also allocate what is on the meta device, and drop the rest."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """What is to be filled at ``index``."""
        found: Tensor = find_tensor_shard(self.state_dict[index.fqn], index)
        return found

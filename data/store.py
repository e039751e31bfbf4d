"""Block stores of rows that nobody prepared: encoded once and kept, or read and encoded again in each epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.block import EncodedBlock


class MemoryStore:
    """Implements :class:`data.block.BlockStore` over blocks in memory."""

    def __init__(self, blocks: Sequence[EncodedBlock]) -> None:
        """Takes the blocks in file order; those without rows are left out."""
        self._blocks = [block for block in blocks if block.num_rows]
        self.block_rows = np.array([block.num_rows for block in self._blocks], dtype=np.int64)
        self.num_positive = sum(int(block.label.sum(dtype=np.int64)) for block in self._blocks)

    def read(self, block: int) -> EncodedBlock:
        """See :meth:`data.block.BlockStore.read`."""
        return self._blocks[block]

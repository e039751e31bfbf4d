"""Inputs of an exported model, from encoded rows. Loads torch, but neither the models nor the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.block import EncodedBlock


@dataclass(frozen=True)
class ModelInputs:
    """B rows as an exported model takes them.

    Attributes:
        dense: float32 [B, N].
        ids: int64 [B, S], table rows of the single-valued sparse features.
        bags: of each multi-valued one its table rows int64 [V], row after row, how many each row has, int64 [B], and
            where the feature has weights, these, float32 [V].
    """

    dense: Tensor
    ids: Tensor
    bags: Sequence[tuple[Tensor, ...]]

    @classmethod
    def of(cls, block: EncodedBlock, start: int = 0, stop: int | None = None) -> ModelInputs:
        """Rows ``start`` to ``stop`` - 1 of a block, copied."""
        stop = block.num_rows if stop is None else stop
        dense = np.empty((stop - start, len(block.dense)), dtype=np.float32)
        for position, numbers in enumerate(block.dense):
            dense[:, position] = numbers[start:stop]
        ids = np.empty((stop - start, len(block.ids)), dtype=np.int64)
        for position, rows in enumerate(block.ids):
            ids[:, position] = rows[start:stop]
        bags = []
        for _, bag in sorted(block.bags.items()):
            part = slice(int(bag.offsets[start]), int(bag.offsets[stop]))
            arrays = [bag.values[part].astype(np.int64), np.diff(bag.offsets[start : stop + 1])]
            if bag.weights is not None:
                arrays.append(bag.weights[part].copy())
            bags.append(tuple(torch.from_numpy(array) for array in arrays))
        return cls(torch.from_numpy(dense), torch.from_numpy(ids), bags)

    def arguments(self) -> tuple[Tensor, Tensor, tuple[tuple[Tensor, ...], ...]]:
        """What the PyTorch programs are called with.

        No lists: where tensordict was imported, a program that is loaded expects lists of its type in their place.
        """
        return self.dense, self.ids, tuple(self.bags)

    def flat(self) -> list[Tensor]:
        """The same one after the other, in the order of the manifest's ``inputs``."""
        return [self.dense, self.ids, *(tensor for bag in self.bags for tensor in bag)]

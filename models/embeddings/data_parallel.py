"""Tables of which every rank has a whole copy, looks up its own ids alone, and averages whole gradients.

An update costs as many bytes as the tables are large, whatever the batch: the way for small tables. (Ranks that join
their ids instead pay for rows of batches, see :mod:`erase_rec.distributed.replicated_tables`.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from erase_rec.distributed.world import World
from models.embeddings.layout import Table
from models.embeddings.torch_backend import TorchEmbeddings


class DataParallelTables(TorchEmbeddings):
    """Implements :class:`erase_rec.protocols.Embeddings` on several ranks, any device.

    Copies stay equal bit for bit: every rank applies the same averaged gradient to the same rows, those that any rank
    touched. An update runs a collective for each embedding dimension, on the current stream and the main thread.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: SparseOptimizerConfig,
        world: World,
        *,
        seed: int,
        device: torch.device,
        pooled_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Builds the copies; see :class:`models.embeddings.torch_backend.TorchEmbeddings`."""
        super().__init__(tables, optimizer, seed=seed, device=device, pooled_dtype=pooled_dtype)
        self._world = world

    def capture_problem(self, sparse: SparseBatch) -> str | None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return "tables that are averaged as a whole find on the host which of their rows any rank touched"

    def _rows_of_all(self, number: int, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that any rank touched, and the mean over the ranks of their gradients."""
        weight = self._groups[number].weight
        dim = weight.shape[1]
        # The last column marks touched rows: a gradient of zero moves Adam's averages, no gradient does not.
        joined = weight.new_zeros(weight.shape[0], dim + 1)
        joined[rows, :dim] = gradient
        joined[rows, dim] = 1
        self._world.mean(f"tables.whole.{number}", joined).wait()
        touched = joined[:, dim].nonzero().flatten()
        return touched, joined[touched, :dim]

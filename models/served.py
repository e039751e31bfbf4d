"""The model as it is served: rows of tables in, probability out, in operations that ``torch.export`` can trace.

Shapes: B rows, N dense features, S single-valued and M multi-valued sparse features, V ids of one of the latter, E sum
of embedding dims.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from erase_rec.batch import Batch
from erase_rec.config.schema import SparseFeatureConfig
from models.ctr_model import CTRModel

Bag = Sequence[Tensor]
"""A multi-valued feature's table rows int64 [V], bag after bag, how many each row has, int64 [B], and where the feature
has weights, these, float32 [V]."""


class ServedModel(nn.Module):
    """A trained model without what only training needs; shares its weights.

    Tables are looked up one by one, which checks ids against each one's rows: of joined tables an id outside its own
    would be another feature's row.
    """

    def __init__(self, model: CTRModel, features: Sequence[SparseFeatureConfig]) -> None:
        """Wraps ``model``, which is left as it is.

        Args:
            model: on the CPU, in float32 and in evaluation mode.
            features: its sparse features, in model order.
        """
        super().__init__()
        self.model = copy.copy(model)
        self.model._modules = dict(model._modules)  # a copied module shares the dictionary of its parts
        self.model.add_module("embeddings", _ServedTables(features, model.embeddings.tables()))

    def forward(self, dense: Tensor, ids: Tensor, bags: Sequence[Bag]) -> tuple[Tensor, Tensor]:
        """Scores rows. The arguments' names are those of the exported program's inputs.

        Args:
            dense: float32 [B, N], transformed.
            ids: int64 [B, S], table rows of the single-valued features, in model order.
            bags: of the M multi-valued features, in model order.

        Returns:
            Probability of a click and logit, float32 [B] each.
        """
        # A score reads dense features and hands the sparse ones to the embeddings; labels and row ids are not read.
        batch = Batch(dense, _ServedSparse(ids, bags), dense, ids)  # type: ignore[arg-type]
        logit_B = self.model.score(batch).logit
        return torch.sigmoid(logit_B), logit_B


@dataclass(frozen=True)
class _ServedSparse:
    """The sparse inputs of :meth:`ServedModel.forward`."""

    ids: Tensor
    bags: Sequence[Bag]


class _ServedTables(nn.Module):
    """Embedding tables that are only read."""

    def __init__(self, features: Sequence[SparseFeatureConfig], tables: Mapping[str, Any]) -> None:
        super().__init__()
        self._multi_valued = [feature.multi_valued for feature in features]
        self._modes = [feature.pooling for feature in features]
        weights = [tables[feature.name] for feature in features]
        assert all(isinstance(weight, Tensor) for weight in weights), "one process holds whole tables"
        self.weights = nn.ParameterList(nn.Parameter(weight.detach(), requires_grad=False) for weight in weights)

    def forward(self, sparse: _ServedSparse) -> Tensor:
        """Pooled embeddings [B, E], feature by feature."""
        single, bags = iter(sparse.ids.unbind(dim=1)), iter(sparse.bags)
        pooled = [
            _pool(next(bags), weight, mode) if multi_valued else nn.functional.embedding(next(single), weight)
            for weight, mode, multi_valued in zip(self.weights, self._modes, self._multi_valued, strict=True)
        ]
        return torch.cat(pooled, dim=1)


def _pool(bag: Bag, weight: Tensor, mode: str) -> Tensor:
    """[B, D]; empty bags are zero."""
    values_V, lengths_B, *weights = bag
    starts_B = lengths_B.cumsum(dim=0) - lengths_B
    return nn.functional.embedding_bag(
        values_V, weight, starts_B, mode=mode, per_sample_weights=weights[0] if weights else None
    )

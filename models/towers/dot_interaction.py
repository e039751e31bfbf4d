"""DLRM's pairwise interaction: dot products of all fields and a projection of the dense features.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv 1906.00091, section 2.1.

Shapes: B rows, N dense features, F vectors, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from erase_rec.config.schema import PositiveInt
from erase_rec.config.types import ProjectedTowerParams
from models.kernels import own_kernel_applies
from models.layers import MLP, missing_columns, side_by_side
from models.towers.tower import Tower, field_problems


class DotInteractionTower(Tower):
    """top([bottom(dense); <v_i, v_j> for i > j; 0 ..]) over the fields v and, where there is one, bottom(dense).

    Zero columns align the width of top's input (:data:`models.layers.ALIGNMENT`).
    """

    pairs: Tensor
    mirrored: Tensor

    class Config(ProjectedTowerParams):
        """Hidden sizes of the bottom MLP (it ends in the embedding dimension) and of the top MLP."""

        bottom_hidden: tuple[PositiveInt, ...] = (64,)
        hidden: tuple[PositiveInt, ...] = (128,)

        @property
        def liftable(self) -> int:
            """All but the top's first."""
            return len(self.hidden)

        def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
            """Fields of one dimension; at least two vectors to multiply."""
            return field_problems("dot_interaction", embedding_dims, at_least=1 if dense_dim else 2)

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.fields, self.dim = len(embedding_dims), embedding_dims[0]
        self.bottom = MLP(dense_dim, (*config.bottom_hidden, self.dim)) if dense_dim else None
        vectors = len(embedding_dims) + (1 if dense_dim else 0)
        rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        mirrored = torch.full((vectors, vectors), len(rows))
        mirrored[rows, columns] = mirrored[columns, rows] = torch.arange(len(rows))
        self.register_buffer("mirrored", mirrored.flatten(), persistent=False)
        top_dim = vectors * (vectors - 1) // 2 + (self.dim if dense_dim else 0)
        self.zero_columns = missing_columns(top_dim)
        self.top_dim = top_dim + self.zero_columns
        self.top = MLP(self.top_dim, (*config.hidden, config.out_dim))
        self.out_dim = config.out_dim

    def lift(self, layers: int) -> nn.Module:
        """See :class:`Tower`."""
        top = self.top.lift(layers)
        self.out_dim = self.top.out_dim
        return top

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, F*D] -> [B, out_dim]."""
        field_BFD = emb_BE.reshape(-1, self.fields, self.dim)
        bottom_BD = None if self.bottom is None else self.bottom(dense_BN)
        result: Tensor = self.top(self._interactions(bottom_BD, field_BFD))
        return result

    def _interactions(self, bottom_BD: Tensor | None, field_BFD: Tensor) -> Tensor:
        """[bottom; pairs; zeros], as wide as the top MLP's input."""
        if self.own_kernels and own_kernel_applies(field_BFD):
            from models.kernels.interaction import dot_interaction, interaction_applies

            if interaction_applies(bottom_BD, field_BFD):
                return dot_interaction(bottom_BD, field_BFD, self.top_dim)
        parts = []
        if bottom_BD is not None:
            field_BFD = torch.cat((bottom_BD.to(field_BFD.dtype).unsqueeze(1), field_BFD), dim=1)
            parts.append(bottom_BD)
        if field_BFD.requires_grad and field_BFD.device.type == "cpu" and not torch.compiler.is_compiling():
            parts.append(_Dots.apply(field_BFD, self.pairs, self.mirrored))  # type: ignore[no-untyped-call]
        else:
            parts.append(_dots(field_BFD, self.pairs))
        return side_by_side(parts, self.zero_columns)


def _dots(field_BFD: Tensor, pairs: Tensor) -> Tensor:
    """The dot products at positions ``pairs`` of the flat [F, F], [B, pairs]."""
    return (field_BFD @ field_BFD.transpose(1, 2)).flatten(1).index_select(1, pairs)


class _Dots(torch.autograd.Function):
    """:func:`_dots` with half the work on the way back: a symmetric gradient takes one product instead of two.

    Autograd scatters the pairs' gradient into [F, F] and multiplies that and its transpose with the fields; a gather of
    both at once is much faster on a CPU than the scatter.
    """

    @staticmethod
    def forward(ctx: Any, field_BFD: Tensor, pairs: Tensor, mirrored: Tensor) -> Tensor:
        ctx.save_for_backward(field_BFD, mirrored)
        return _dots(field_BFD, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        field_BFD, mirrored = ctx.saved_tensors
        fields = field_BFD.shape[1]
        symmetric_BFF = pad(gradient, (0, 1)).index_select(1, mirrored).view(-1, fields, fields)
        return symmetric_BFF @ field_BFD, None, None

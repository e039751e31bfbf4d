"""What a tower is: a module from the features that it reads to a vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from erase_rec.config.types import TowerParams


class Tower(nn.Module, ABC):
    """Base of the dense sub-architectures.

    A subclass sits in a file of its own with its ``Config``, takes ``(config, dense_dim, embedding_dims)`` and
    implements ``forward(dense_BN, emb_BE)``. ``emb_BE`` holds the selected features' pooled embeddings side by
    side; where all dims equal D it can be viewed as [B, F, D]. ``dense_BN`` holds the selected dense features, then the
    outputs of the towers that it reads; it may have no columns.

    Attributes:
        out_dim: columns of the output, as ``Config.output_dim`` says.
        own_kernels: whether it may use this project's kernels where :func:`models.kernels.own_kernel_applies` says so;
            the operations of PyTorch in ``forward`` stay the definition. ``build_model`` sets it from
            ``model.kernels``.
    """

    Config: type[TowerParams]
    out_dim: int
    own_kernels: bool = False

    def lift(self, layers: int) -> nn.Module:
        """Takes the tower's last ``layers`` layers off and returns them: what it now gives to what it gave.

        At most ``Config.liftable``; changes ``out_dim``.
        """
        raise NotImplementedError(f"no layer of a {type(self).__name__} can be above its cut")

    @abstractmethod
    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, E] -> [B, out_dim]."""


class ProjectedTower(Tower):
    """A tower that ends in one linear projection.

    Attributes:
        projection: None where it is above the cut.
    """

    projection: nn.Linear | None

    def lift(self, layers: int) -> nn.Module:
        """See :class:`Tower`: the projection."""
        projection = self.projection
        assert layers == 1
        assert projection is not None
        self.projection, self.out_dim = None, projection.in_features
        return projection


def field_problems(kind: str, embedding_dims: Sequence[int], *, at_least: int = 1) -> list[str]:
    """Problems of a tower that works on fields: it needs enough of them, all of one dimension."""
    if len(embedding_dims) < at_least:
        noun = "feature" if at_least == 1 else "features"
        return [f"{kind} needs at least {at_least} sparse {noun}, found {len(embedding_dims)}"]
    if len(set(embedding_dims)) > 1:
        dims = sorted(set(embedding_dims))
        return [f"{kind} needs one embedding_dim for all its sparse features, found {dims}; choose inputs.sparse"]
    return []

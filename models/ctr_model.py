"""The model: embeddings, towers with their local heads, over-arch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from erase_rec.batch import Batch, Scores
from erase_rec.config.schema import Config, TowerConfig
from erase_rec.protocols import Embeddings, LocalLoss
from models.layers import seeded
from models.local_losses import at_least_float32
from models.over_arch import OverArch
from models.registry import component
from models.towers.tower import Tower


class ColumnSelection(nn.Module):
    """Chooses columns of a [B, X] tensor; all of them in order is free of copies, and so is none."""

    index: Tensor | None

    def __init__(self, columns: Sequence[int], available: int) -> None:
        super().__init__()
        self.dim = len(columns)
        everything = list(columns) == list(range(available))
        index = None if everything or not columns else torch.tensor(list(columns))
        self.register_buffer("index", index, persistent=False)

    def forward(self, x_BX: Tensor) -> Tensor:
        """[B, X] -> [B, dim]."""
        if self.index is not None:
            return x_BX.index_select(1, self.index)
        return x_BX if self.dim else x_BX[:, :0]


class TowerBlock(nn.Module):
    """Input selection, tower, and local head; implements :class:`erase_rec.protocols.TowerBlock`."""

    def __init__(self, tower: Tower, dense: ColumnSelection, sparse: ColumnSelection) -> None:
        super().__init__()
        self.dense, self.sparse = dense, sparse
        self.tower = tower
        self.head = nn.Linear(tower.out_dim, 1)
        self.out_dim = tower.out_dim

    def forward(self, dense: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N], [B, E] -> output [B, out_dim], local logit [B] in float32 at least."""
        output_BO = self.tower(self.dense(dense), self.sparse(pooled))
        return output_BO, at_least_float32(self.head(output_BO).squeeze(1))


class CTRModel(nn.Module):
    """Implements :class:`erase_rec.protocols.CTRModel`."""

    embeddings: Embeddings

    def __init__(self, embeddings: Embeddings, towers: Mapping[str, TowerBlock], over_arch: OverArch) -> None:
        """Joins the parts; ``embeddings`` is an ``nn.Module``."""
        super().__init__()
        self.embeddings = embeddings
        self.towers = nn.ModuleDict(dict(towers))
        self.over_arch = over_arch

    def tower(self, name: str) -> TowerBlock:
        """The block of that name."""
        block = self.towers[name]
        assert isinstance(block, TowerBlock)
        return block

    def tower_names(self) -> Sequence[str]:
        """Names in configuration order."""
        return list(self.towers)

    def score(self, batch: Batch) -> Scores:
        """Forward pass without cuts; the caller chooses grad and train mode."""
        pooled = self.embeddings(batch.sparse)
        outputs, logits = [], {}
        for name in self.tower_names():
            output, logits[name] = self.tower(name)(batch.dense, pooled)
            outputs.append(output)
        return Scores(self.over_arch(outputs, list(logits.values())), logits)

    def dense_state(self) -> dict[str, Tensor]:
        """State of everything but the tables; shares storage."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("embeddings.")}

    def load_dense_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies ``state`` into the model; names and shapes must match."""
        own = self.dense_state()
        assert own.keys() == state.keys()
        for name, value in own.items():
            value.copy_(state[name])


def build_model(config: Config, embeddings: Embeddings, device: torch.device) -> CTRModel:
    """Builds the model of ``config`` in float32 around ``embeddings``; initial weights depend on names and seed."""
    towers = {tower.name: _build_tower(config, tower, list(embeddings.feature_dims)) for tower in config.towers}
    with seeded(config.seed, "over_arch"):
        over_arch = OverArch(config.over_arch, [block.out_dim for block in towers.values()])
    for module in (*towers.values(), over_arch):
        module.to(device)
    return CTRModel(embeddings, towers, over_arch)


def build_local_losses(config: Config) -> dict[str, LocalLoss]:
    """The local loss of each tower that declares one with a weight above 0."""
    losses: dict[str, LocalLoss] = {}
    for tower in config.towers:
        if tower.loss is not None and tower.loss.weight > 0:
            kind = component("local_loss", tower.loss.kind)
            losses[tower.name] = kind(kind.Config(**tower.loss.params))
    return losses


def _build_tower(config: Config, tower: TowerConfig, feature_dims: Sequence[int]) -> TowerBlock:
    dense = _chosen(tower.inputs.dense, [feature.name for feature in config.features.dense])
    sparse = _chosen(tower.inputs.sparse, [feature.name for feature in config.features.sparse])
    starts = [sum(feature_dims[:index]) for index in range(len(feature_dims))]
    columns = [column for i in sparse for column in range(starts[i], starts[i] + feature_dims[i])]
    kind = component("tower", tower.kind)
    with seeded(config.seed, f"towers.{tower.name}"):
        module = kind(kind.Config(**tower.params), len(dense), [feature_dims[i] for i in sparse])
        return TowerBlock(
            module, ColumnSelection(dense, len(config.features.dense)), ColumnSelection(columns, sum(feature_dims))
        )


def _chosen(inputs: bool | Sequence[str], names: Sequence[str]) -> list[int]:
    """Positions of the features that a tower reads, in feature order."""
    if isinstance(inputs, bool):
        return list(range(len(names))) if inputs else []
    return [position for position, name in enumerate(names) if name in inputs]

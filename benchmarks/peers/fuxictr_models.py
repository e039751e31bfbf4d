"""FuxiCTR: its embeddings, layers, loss, optimizer and training loop, on encoded rows.

The wheel holds layers and the trainer (``BaseModel``), and of its model zoo the long-sequence models alone. So DLRM,
DCNv2, DeepFM and FinalMLP are put together here of its public layers as their papers say, in the sizes of our towers.
MaskNet's block is in no wheel: :class:`MaskBlock` follows the paper (arXiv 2102.07619, equations 3 to 8).

Settings that would hurt it needlessly are not used: validation by AUC, learning-rate decay when validation stalls (as
the rates are searched), checkpoints on disk, a progress bar, its loader that stacks Python rows one by one, and one
rate for tables and layers alike, and vectors of numbers that start large (:data:`NUMBER_STD`; with them DeepFM begins
at an NE of 2 on Criteo's rows and stays there).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

import absent  # noqa: F401 (stands in for what FuxiCTR imports)
import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders.npz_dataloader import NpzDataLoader
from fuxictr.pytorch.layers import (
    CrossNetV2,
    FactorizationMachine,
    FeatureEmbedding,
    InnerProductInteraction,
    MLP_Block,
)
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything
from model_zoo.LongCTR.FinalMLP.FinalMLP import FeatureSelection, InteractionAggregation
from optimizers import optimizer_of
from rows import Array, Fields, Part, Setting, Watch
from torch import Tensor, nn

HIDDEN = [128, 64]
LABEL = "label"
OWN_LOADER = ", its own loader"
PREDICTED_ROWS = 8192
NUMBER_STD = 0.01
"""Of the weights that make a number's vector: FuxiCTR resets them to Xavier's 0.34, thousands of times a category's."""


class Rows:
    """Batches as FuxiCTR's models take them: a tensor a column; one gather a batch for all columns of a type."""

    def __init__(self, part: Part, fields: Fields, batch_size: int, *, shuffle: bool) -> None:
        """Keeps the columns side by side."""
        self._numbers = torch.from_numpy(np.column_stack([part.dense, part.label]))
        self._ids = torch.from_numpy(np.column_stack([part.ids, *part.bags.values()]).astype(np.int64))
        self._dense, self._tables = fields.dense, tuple(fields.tables)
        self._bags = {name: ids.shape[1] for name, ids in part.bags.items()}
        self._batch_size, self._shuffle = batch_size, shuffle

    def __len__(self) -> int:
        return -(-len(self._ids) // self._batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        count = len(self._ids)
        order = torch.randperm(count) if self._shuffle else torch.arange(count)
        for rows in order.split(self._batch_size):
            numbers, ids = self._numbers[rows], self._ids[rows]
            batch = dict(zip(self._dense, numbers.unbind(1), strict=False))
            batch |= dict(zip(self._tables, ids.unbind(1), strict=False))
            start = len(self._tables)
            for name, width in self._bags.items():
                batch[name] = ids[:, start : start + width]
                start += width
            yield batch | {LABEL: numbers[:, -1]}


class Model(BaseModel):  # type: ignore[misc]
    """What all models share: two rates, and an evaluation that a :class:`Watch` judges."""

    def __init__(self, fields: Fields, setting: Setting) -> None:
        """Builds nothing yet but what the trainer needs."""
        self.map = feature_map(fields)
        super().__init__(
            self.map,
            gpu=-1,
            eval_steps=fields.eval_every_steps,
            reduce_lr_on_plateau=False,
            verbose=0,
            model_root="",
            metrics=["logloss"],
        )
        self.fields, self.setting = fields, setting
        self.watch: Watch | None = None

    def ready(self) -> None:
        """Loss, weights as FuxiCTR starts them, and an optimizer of their own for tables."""
        self.compile("adam", "binary_crossentropy", self.setting.dense_lr)
        self.reset_parameters()
        for name, layer in self.named_modules():
            if "embedding_layers" in name and isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=NUMBER_STD)
        self.optimizer = optimizer_of(self, self.setting)

    def mlp(self, width: int, output: int | None = None) -> nn.Module:
        """FuxiCTR's, in the size of our deep tower."""
        return MLP_Block(width, HIDDEN, output_dim=output, dropout_rates=self.setting.dropout)

    def probability(self, logit: Tensor) -> dict[str, Tensor]:
        """What its trainer wants of a forward."""
        return {"y_pred": self.output_activation(logit)}

    def eval_step(self) -> None:
        """Where its training loop evaluates."""
        if self.watch is not None:
            self._stop_training = self.watch.stops(self.scores)
            self.train()

    def load_weights(self, checkpoint: str) -> None:
        """Nothing: the watch has the predictions of the best epoch."""

    def scores(self, part: Part) -> Array:
        """Probabilities [R]."""
        found: Array = self.predict(Rows(part, self.fields, PREDICTED_ROWS, shuffle=False))
        return found


def feature_map(fields: Fields) -> FeatureMap:
    """FuxiCTR's description of the columns."""
    found = FeatureMap("rows", "")
    found.labels, found.default_emb_dim = [LABEL], fields.dim
    for name in fields.dense:
        found.features[name] = {"type": "numeric", "source": ""}
    for name, rows in fields.tables.items():
        found.features[name] = {"type": "categorical", "source": "", "vocab_size": rows}
    for name, (rows, longest) in fields.bags.items():
        found.features[name] = {
            "type": "sequence",
            "source": "",
            "vocab_size": rows + 1,
            "padding_idx": 0,
            "max_len": longest,
            "feature_encoder": "layers.MaskedAveragePooling()",
        }
    found.num_fields = found.get_num_fields()
    found.set_column_index()
    return found


class DLRM(Model):
    """Bottom MLP, dot products of all pairs, top MLP (arXiv 1906.00091)."""

    def __init__(self, fields: Fields, setting: Setting) -> None:
        super().__init__(fields, setting)
        self.embedding = FeatureEmbedding(self.map, fields.dim, not_required_feature_columns=list(fields.dense))
        bottom = bool(fields.dense)
        self.bottom = MLP_Block(len(fields.dense), [32], output_dim=fields.dim) if bottom else None
        count = len(fields.tables) + len(fields.bags) + int(bottom)
        self.interaction = InnerProductInteraction(count, output="inner_product")
        self.top = self.mlp(count * (count - 1) // 2 + (fields.dim if bottom else 0), 1)
        self.ready()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`Model.probability`."""
        X = self.get_inputs(inputs)
        vectors = self.embedding({name: X[name] for name in X if name not in self.fields.dense})
        if self.bottom is None:
            return self.probability(self.top(self.interaction(vectors)))
        dense = self.bottom(torch.stack([X[name].float() for name in self.fields.dense], dim=1))
        pairs = self.interaction(torch.cat([vectors, dense.unsqueeze(1)], dim=1))
        return self.probability(self.top(torch.cat([pairs, dense], dim=1)))


class DCNv2(Model):
    """Cross network beside an MLP (arXiv 2008.13535)."""

    def __init__(self, fields: Fields, setting: Setting) -> None:
        super().__init__(fields, setting)
        self.embedding = FeatureEmbedding(self.map, fields.dim)
        width = self.map.sum_emb_out_dim()
        self.cross, self.deep = CrossNetV2(width, 2), self.mlp(width)
        self.out = nn.Linear(width + HIDDEN[-1], 1)
        self.ready()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`Model.probability`."""
        flat = self.embedding(self.get_inputs(inputs), flatten_emb=True)
        return self.probability(self.out(torch.cat([self.cross(flat), self.deep(flat)], dim=1)))


class DeepFM(Model):
    """Factorization machine beside an MLP (arXiv 1703.04247)."""

    def __init__(self, fields: Fields, setting: Setting) -> None:
        super().__init__(fields, setting)
        self.embedding = FeatureEmbedding(self.map, fields.dim)
        self.fm, self.deep = FactorizationMachine(self.map), self.mlp(self.map.sum_emb_out_dim(), 1)
        self.ready()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`Model.probability`."""
        X = self.get_inputs(inputs)
        vectors = self.embedding(X)
        return self.probability(self.fm(X, vectors) + self.deep(vectors.flatten(start_dim=1)))


class FinalMLP(Model):
    """Two MLPs with feature gates, joined by a bilinear form (arXiv 2304.00902)."""

    def __init__(self, fields: Fields, setting: Setting) -> None:
        super().__init__(fields, setting)
        self.embedding = FeatureEmbedding(self.map, fields.dim)
        width = self.map.sum_emb_out_dim()
        self.gates = FeatureSelection(self.map, width, fields.dim, [64])
        self.first, self.second = self.mlp(width), self.mlp(width)
        self.join = InteractionAggregation(HIDDEN[-1], HIDDEN[-1], output_dim=1, num_heads=1)
        self.ready()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`Model.probability`."""
        X = self.get_inputs(inputs)
        first, second = self.gates(X, self.embedding(X, flatten_emb=True))
        return self.probability(self.join(self.first(first), self.second(second)))


class MaskBlock(nn.Module):
    """A layer on masked input: ReLU(LN(W (mask(v) * h)))."""

    def __init__(self, width: int, input_width: int, output_width: int) -> None:
        super().__init__()
        self.mask = MLP_Block(width, [64], output_dim=input_width)
        self.layer = nn.Sequential(nn.Linear(input_width, output_width), nn.LayerNorm(output_width), nn.ReLU())

    def forward(self, flat: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings [B, width] make the mask of a layer's input [B, input_width]."""
        masked: Tensor = self.layer(self.mask(flat) * hidden)
        return masked


class MaskNet(Model):
    """Two mask blocks in a row, on normalized embeddings."""

    def __init__(self, fields: Fields, setting: Setting) -> None:
        super().__init__(fields, setting)
        self.embedding, width = FeatureEmbedding(self.map, fields.dim), self.map.sum_emb_out_dim()
        self.norm = nn.LayerNorm(fields.dim)
        self.blocks = nn.ModuleList([MaskBlock(width, width, 64), MaskBlock(width, 64, 64)])
        self.drop, self.out = nn.Dropout(setting.dropout), nn.Linear(64, 1)
        self.ready()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`Model.probability`."""
        vectors = self.embedding(self.get_inputs(inputs))
        flat, hidden = vectors.flatten(start_dim=1), self.norm(vectors).flatten(start_dim=1)
        for block in self.blocks:
            hidden = self.drop(block(flat, hidden))
        return self.probability(self.out(hidden))


MODELS: dict[str, Callable[[Fields, Setting], Model]] = {
    "DLRM": DLRM,
    "DCNv2": DCNv2,
    "DeepFM": DeepFM,
    "FinalMLP": FinalMLP,
    "MaskNet": MaskNet,
}


class Peer:
    """A model with its trainer."""

    def __init__(self, name: str, fields: Fields, setting: Setting) -> None:
        """Builds ``name`` of :data:`MODELS`; with :data:`OWN_LOADER` after it, it is fed by FuxiCTR's loader."""
        seed_everything(setting.seed)
        self._fields, self._own_loader = fields, name.endswith(OWN_LOADER)
        self.model = MODELS[name.removesuffix(OWN_LOADER)](fields, setting)

    def rows(self, part: Part) -> Rows | NpzDataLoader:
        """What :meth:`train` takes."""
        if not self._own_loader:
            return Rows(part, self._fields, self._fields.batch_size, shuffle=True)
        columns = dict(zip(self._fields.dense, part.dense.T, strict=True))
        columns |= dict(zip(self._fields.tables, part.ids.T, strict=True))
        with tempfile.TemporaryDirectory() as folder:
            np.savez(f"{folder}/rows.npz", **columns, **part.bags, **{LABEL: part.label})
            return NpzDataLoader(self.model.map, f"{folder}/rows.npz", self._fields.batch_size, shuffle=True)

    def train(self, rows: Rows | NpzDataLoader, epochs: int = 1, watch: Watch | None = None) -> None:
        """Trains on ``rows``; judged now and then by ``watch``."""
        self.model.watch = watch
        self.model.fit(rows, epochs=epochs, validation_data=())

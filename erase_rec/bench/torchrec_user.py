"""The rival that people run today: a DLRM-style module over a TorchRec collection, trained by a plain loop.

Written as TorchRec's examples are: a KeyedJaggedTensor goes through an embedding bag collection whose optimizer is
fused into the backward, dense parts follow, autocast gives bf16, and torch.optim.Adam (fused) updates the dense
parameters. The collection is ``FusedEmbeddingBagCollection`` and not a ``DistributedModelParallel`` of
``EmbeddingBagCollection``: on one device both run the same FBGEMM kernel, and the former has less around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from erase_rec.batch import Batch, StepOutput
from erase_rec.config.schema import Config
from erase_rec.environment import triple_problem
from erase_rec.errors import UserError
from erase_rec.protocols import CTRModel


@dataclass(frozen=True)
class TorchRecTable:
    """One feature's table."""

    rows: int
    dim: int
    pooling: str


class TorchRecModel(nn.Module):
    """Collection, towers, over-arch: every gradient exact, as nothing is cut."""

    def __init__(self, collection: nn.Module, keys: Sequence[str], model: CTRModel) -> None:
        """Takes towers and over-arch from ``model``, whose own embeddings are left alone."""
        super().__init__()
        self.collection = collection
        self.keys = list(keys)
        self.towers = nn.ModuleList(_module(model.tower(name)) for name in model.tower_names())
        self.over_arch = _module(model.over_arch)
        names = list(model.tower_names())
        self.reads = [[names.index(other) for other in model.tower(name).inputs] for name in names]

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        """Dense [B, N] and a KeyedJaggedTensor -> logit [B]."""
        pooled = self.collection(features)
        assert pooled.keys() == self.keys
        pooled_BE = pooled.values()
        outputs: list[Tensor] = []
        logits: list[Tensor] = []
        for tower, reads in zip(self.towers, self.reads, strict=True):
            output, logit = tower(dense, pooled_BE, [outputs[other] for other in reads])
            outputs.append(output)
            logits.append(logit)
        result: Tensor = self.over_arch(outputs, logits)
        return result


class TorchRecStep:
    """Implements :class:`erase_rec.protocols.TrainStep`: zero_grad, forward, backward, step."""

    def __init__(
        self,
        model: TorchRecModel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        """Trains ``model``, which is on ``device``."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        self.model = model
        self._optimizer = optimizer
        self._device = device
        self._autocast_dtype = autocast_dtype
        self._jagged = KeyedJaggedTensor

    def device(self) -> torch.device:
        """The model's device."""
        return self._device

    def __call__(self, batch: Batch, *, measure: bool = False) -> StepOutput:
        """See :class:`erase_rec.protocols.TrainStep`; nothing is measured, and losses are not checked."""
        sparse = batch.sparse
        # A new one each step, as a loader gives it: what it computes lazily (offsets, sizes) is part of the step.
        features = self._jagged(self.model.keys, sparse.values, weights=sparse.weights, lengths=sparse.lengths)
        enabled, dtype = self._autocast_dtype is not None, self._autocast_dtype or torch.bfloat16
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, dtype=dtype, enabled=enabled):
            logit = self.model(batch.dense, features)
            loss = binary_cross_entropy_with_logits(logit, batch.label)
        torch.autograd.backward(loss)
        self._optimizer.step()
        loss = loss.detach()
        return StepOutput(logit=logit.detach(), tower_logits={}, loss=loss, finite=torch.isfinite(loss).reshape(1))

    def kept(self) -> dict[str, Tensor]:
        """See :class:`erase_rec.protocols.TrainStep`: nothing."""
        return {}

    def load_tables(self, weights: Sequence[Tensor]) -> None:
        """Copies weights [rows, dim] into the tables, in feature order."""
        for table, weight in zip(_tables_of(self.model.collection), weights, strict=True):
            table.copy_(weight)


def build_torchrec_step(
    config: Config, model: CTRModel, tables: Mapping[str, TorchRecTable], device: torch.device
) -> TorchRecStep:
    """The rival's step; its tables get initial weights on the device.

    Args:
        config: optimizers and precision.
        model: towers and over-arch, float32, on ``device``; its embeddings are not used.
        tables: by feature, in feature order.
        device: where it trains.

    Raises:
        UserError: TorchRec is not here, or the configuration is one that this program does not have.
    """
    problem = triple_problem() or _problem(config, tables)
    if problem is not None:
        raise UserError(f"arm torchrec: {problem}")
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    keys = [f"f{position}" for position in range(len(tables))]
    sparse, dense = config.optimizer.sparse, config.optimizer.dense
    collection = FusedEmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                name=key,
                feature_names=[key],
                pooling=PoolingType[table.pooling.upper()],
            )
            for key, table in zip(keys, tables.values(), strict=True)
        ],
        optimizer_type=RowWiseAdagrad if sparse.kind == "rowwise_adagrad" else torch.optim.SGD,
        optimizer_kwargs={"lr": sparse.lr} | ({"eps": sparse.eps} if sparse.kind == "rowwise_adagrad" else {}),
        is_weighted=any(feature.weights for feature in config.features.sparse),
        device=device,
    )
    for weight, table in zip(_tables_of(collection), tables.values(), strict=True):
        weight.uniform_(-(table.rows**-0.5), table.rows**-0.5)
    module = TorchRecModel(collection, keys, model)
    parameters = [
        each for part in (module.towers, module.over_arch) for each in part.parameters() if each.requires_grad
    ]
    optimizer = torch.optim.Adam(
        parameters, lr=dense.lr, betas=(dense.beta1, dense.beta2), eps=dense.eps, fused=device.type == "cuda"
    )
    return TorchRecStep(module, optimizer, device, torch.bfloat16 if config.train.precision == "bf16" else None)


def _problem(config: Config, tables: Mapping[str, TorchRecTable]) -> str | None:
    if config.optimizer.dense.kind != "adam" or config.optimizer.dense.weight_decay:
        return "its dense optimizer is Adam without weight decay; use optimizer.dense.kind=adam"
    if config.optimizer.dense.max_grad_norm is not None:
        return "it does not clip gradients; leave optimizer.dense.max_grad_norm out"
    if config.optimizer.sparse.kind not in {"rowwise_adagrad", "sgd"}:
        return "its tables' optimizer is rowwise_adagrad or sgd; use one of them as optimizer.sparse.kind"
    if len({table.pooling for table in tables.values()}) > 1:
        return "its collection pools all features alike; use one features.sparse_defaults.pooling"
    odd = sorted({table.dim for table in tables.values() if table.dim % 4})
    if odd:
        return f"FBGEMM needs embedding dimensions that are multiples of 4, found {odd}"
    return None


def _module(part: object) -> nn.Module:
    assert isinstance(part, nn.Module)
    return part


@torch.no_grad()
def _tables_of(collection: nn.Module) -> list[Tensor]:
    """Weight [rows, dim] of each table, in feature order; shares storage."""
    held: Any = collection
    (lookups,) = held._emb_modules  # one, since pooling and data type are common
    weights: list[Tensor] = list(lookups._emb_module.split_embedding_weights())
    return weights

"""The model: embeddings, towers with their local heads, over-arch.

Shapes: B rows, N dense features, E sum of embedding dims, O a tower's ``out_dim``, X any width.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor, nn

from erase_rec.batch import Batch, Scores
from erase_rec.config.schema import Config, TowerConfig
from erase_rec.config.types import TowerParams
from erase_rec.errors import ConfigError, UserError
from erase_rec.protocols import Embeddings, LocalLoss
from erase_rec.protocols import OverArch as OverArchProtocol
from models.heads import LinearHead, LogitHead, TowerHead
from models.layers import MLP, missing_columns, seeded, side_by_side
from models.local_losses import build_local_loss
from models.over_arch import OverArch
from models.registry import component
from models.towers.tower import Tower


class ColumnSelection(nn.Module):
    """Chooses columns of a [B, X] tensor: all of them for free, a contiguous range as a view, others as a copy."""

    index: Tensor | None

    def __init__(self, columns: Sequence[int], available: int) -> None:
        """Chooses ``columns``, rising, of ``available``."""
        super().__init__()
        self.available = available
        self.start = columns[0] if columns else 0
        self.width = len(columns)
        contiguous = list(columns) == list(range(self.start, self.start + self.width))
        self.register_buffer("index", None if contiguous else torch.tensor(columns), persistent=False)

    def forward(self, x_BX: Tensor) -> Tensor:
        """[B, available or more] -> [B, width]; no columns chosen: a tensor through which no gradient flows."""
        assert x_BX.shape[1] >= self.available
        if self.width == x_BX.shape[1]:
            return x_BX
        if self.width == 0:
            return x_BX.new_empty((x_BX.shape[0], 0))
        if self.index is None:
            return x_BX.narrow(1, self.start, self.width)
        return x_BX.index_select(1, self.index)


class TowerBlock(nn.Module):
    """Input selection, tower, and local head; implements :class:`erase_rec.protocols.TowerBlock`.

    A tower that reads dense columns gets zero columns after them, as many as make its whole input's width (dense and
    embeddings) a multiple of :data:`models.layers.ALIGNMENT`: on every device and in every precision, so that
    parameters and checkpoints have one shape. The gradient of their weights is zero. A kind whose output width follows
    its input's (``transformer``) gets none.

    A frozen block has no trainable parameter and stays in evaluation mode: running statistics would change it too.
    """

    def __init__(
        self,
        tower: Tower,
        dense: ColumnSelection,
        sparse: ColumnSelection,
        inputs: Sequence[str] = (),
        *,
        head: TowerHead | None = None,
        zero_columns: int = 0,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.dense, self.sparse = dense, sparse
        self.tower = tower
        self.head: TowerHead = head or LinearHead(LinearHead.Config(), tower.out_dim)
        self.out_dim = tower.out_dim
        self.inputs: Sequence[str] = tuple(inputs)
        self.zero_columns = zero_columns
        self.frozen = frozen
        self.requires_grad_(not frozen)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """As ``nn.Module.train``; a frozen block stays in evaluation mode."""
        return super().train(mode and not self.frozen)

    def forward(self, dense_BN: Tensor, pooled_BE: Tensor, outputs: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        """[B, N], [B, E], [B, O] a tower read -> output [B, out_dim], local logit [B] in float32 at least."""
        assert len(outputs) == len(self.inputs)
        with_zeros = self.dense.width + self.zero_columns
        if self.dense.width == self.dense.available and not outputs and dense_BN.shape[1] >= with_zeros:
            dense_BX = dense_BN.narrow(1, 0, with_zeros).to(pooled_BE.dtype)  # the batch has the zero columns already
        else:
            dense_BX = side_by_side((self.dense(dense_BN).to(pooled_BE.dtype), *outputs), self.zero_columns)
        output_BO = self.tower(dense_BX, self.sparse(pooled_BE))
        return self.head.passed_on(output_BO), self.head(output_BO)


class CTRModel(nn.Module):
    """Implements :class:`erase_rec.protocols.CTRModel`."""

    embeddings: Embeddings
    over_arch: OverArchProtocol

    def __init__(
        self,
        embeddings: Embeddings,
        towers: Mapping[str, TowerBlock],
        over_arch: OverArch,
        *,
        sampling_rate: float = 1.0,
        shifted: Collection[str] = (),
    ) -> None:
        """Joins the parts.

        Args:
            embeddings: an ``nn.Module``.
            towers: by name.
            over_arch: on all of them.
            sampling_rate: share of the negative rows that the model is trained on.
            shifted: towers whose logits are predictions of their own, and are corrected for it too.
        """
        super().__init__()
        self._shift, self._shifted = math.log(sampling_rate), frozenset(shifted)
        self.embeddings = embeddings
        # A list beside the names: an nn.ModuleDict refuses the names of its own methods (`keys`, `type` ...).
        self._names = tuple(towers)
        self._blocks = nn.ModuleList(towers.values())
        self.over_arch = over_arch

    def tower(self, name: str) -> TowerBlock:
        """The block of that name."""
        block = self._blocks[self._names.index(name)]
        assert isinstance(block, TowerBlock)
        return block

    def tower_names(self) -> Sequence[str]:
        """Names in configuration order."""
        return self._names

    def score(self, batch: Batch, *, terms: bool = False, ablate: bool = False) -> Scores:
        """Forward pass of the whole model on the current stream.

        The caller chooses grad and train mode. Logits are [B], float32 at least, and speak of all rows: where negative
        rows were sampled, the odds that were learnt are too high by 1 / rate (He et al., ADKDD 2014, section 6.3).

        Args:
            batch: on the model's device.
            terms: also say what each tower's logit adds; where none is added, the logit without each tower.
            ablate: also say the logit without each tower: the over-arch once more for each.
        """
        pooled_BE = self.embeddings(batch.sparse)
        outputs: dict[str, Tensor] = {}
        logits: dict[str, Tensor] = {}
        for name in self._names:
            block = self.tower(name)
            read = [outputs[other] for other in block.inputs]
            outputs[name], logits[name] = block(batch.dense, pooled_BE, read)
        logit = self.over_arch(list(outputs.values()), list(logits.values()))
        added = self.over_arch.terms(list(outputs.values()), list(logits.values())) if terms else None
        without: dict[str, Tensor] = {}
        if ablate or (terms and added is None):
            without = {name: self._without(name, outputs, logits) + self._shift for name in self._names}
        if self._shift:
            logit = logit + self._shift
            logits = {name: each + self._shift if name in self._shifted else each for name, each in logits.items()}
        named = {} if added is None else dict(zip(self._names, added.unbind(), strict=True))
        return Scores(logit, logits, named, without)

    def _without(self, dropped: str, outputs: Mapping[str, Tensor], logits: Mapping[str, Tensor]) -> Tensor:
        """The logit, [B], had a tower given zeros to the over-arch; towers that read it read what it gave."""
        parts = (
            [torch.zeros_like(value) if name == dropped else value for name, value in found.items()]
            for found in (outputs, logits)
        )
        return self.over_arch(*parts)

    def dense_state(self) -> dict[str, Tensor]:
        """Parameters and buffers but for the tables, as ``towers.<name>...`` and ``over_arch...``; shares storage."""
        state: dict[str, Tensor] = {}
        for name in self._names:
            state |= self.tower(name).state_dict(prefix=f"towers.{name}.")
        return state | self.get_submodule("over_arch").state_dict(prefix="over_arch.")

    def load_dense_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies ``state`` into the model, in place.

        Raises:
            UserError: names or shapes are not this model's; nothing was copied.
        """
        own = self.dense_state()
        problems = [f"{name} is missing" for name in own if name not in state]
        problems += [f"{name} is not part of this model" for name in state if name not in own]
        problems += [
            f"{name} has shape {tuple(state[name].shape)}, expected {tuple(value.shape)}"
            for name, value in own.items()
            if name in state and state[name].shape != value.shape
        ]
        if problems:
            raise UserError(f"the weights belong to another configuration: {'; '.join(problems)}")
        for name, value in own.items():
            value.copy_(state[name])


def build_model(
    config: Config, embeddings: Embeddings, device: torch.device, dtype: torch.dtype = torch.float32
) -> CTRModel:
    """Builds the towers and the over-arch of ``config`` around ``embeddings``, which is left as it is.

    Initial weights depend on the seed and the tower's name alone: not on the device, nor on the other towers. What no
    loss trains does not require gradients: frozen towers, and heads whose logit has no loss and does not reach the
    over-arch.

    Args:
        config: resolved configuration.
        embeddings: an ``nn.Module``, one table a sparse feature of ``config``, already on ``device``.
        device: where towers and over-arch go.
        dtype: of their parameters; float64 for exactness tests, with tables of that dtype.

    Raises:
        ConfigError: a tower does not fit its inputs.
    """
    feature_dims = list(embeddings.feature_dims)
    assert len(feature_dims) == len(config.features.sparse)
    towers: dict[str, TowerBlock] = {}
    out_dims: list[int] = []
    lifted: dict[int, nn.Module] = {}
    for position, tower in enumerate(config.towers):
        block, out_dim, above = _build_tower(config, tower, feature_dims, towers)
        towers[tower.name] = block
        out_dims.append(out_dim)
        if above is not None:
            lifted[position] = above
    with seeded(config.seed, "over_arch"):
        over_arch = OverArch(config.over_arch, out_dims, lifted)
    for module in (*towers.values(), over_arch):
        module.to(device=device, dtype=dtype)
        for part in module.modules():
            if isinstance(part, Tower | MLP | LogitHead):
                part.own_kernels = config.model.kernels == "auto"
    return CTRModel(
        embeddings,
        towers,
        over_arch,
        sampling_rate=config.data.negative_sampling_rate or 1.0,
        # Under the joint target a tower's logit is a term of a sum.
        shifted=[tower.name for tower in config.towers if tower.loss is None or tower.loss.target == "own"],
    )


def build_local_losses(config: Config) -> dict[str, LocalLoss]:
    """The local loss of each tower that declares one with a weight above 0."""
    return {
        tower.name: build_local_loss(tower.loss)
        for tower in config.towers
        if tower.loss is not None and tower.loss.weight > 0
    }


def _build_tower(
    config: Config, tower: TowerConfig, feature_dims: Sequence[int], earlier: Mapping[str, TowerBlock]
) -> tuple[TowerBlock, int, nn.Module | None]:
    """The block of a tower, the columns of the whole tower's output, and its layers above the cut, if any."""
    num_dense = len(config.features.dense)
    dense = _chosen(tower.inputs.dense, [feature.name for feature in config.features.dense])
    sparse = _chosen(tower.inputs.sparse, [feature.name for feature in config.features.sparse])
    dense_dim = len(dense) + sum(earlier[name].out_dim for name in tower.inputs.towers)
    chosen_dims = [feature_dims[i] for i in sparse]
    starts = [0, *accumulate(feature_dims)]
    columns = [column for i in sparse for column in range(starts[i], starts[i + 1])]

    kind = component("tower", tower.kind)
    params = kind.Config(**tower.params)
    problems = params.problems(dense_dim, chosen_dims)
    if problems:
        raise ConfigError([f"towers.{tower.name}: {problem}" for problem in problems])
    zero_columns = _zero_columns(params, dense_dim, chosen_dims)
    head_kind = component("head", tower.head.kind)
    with seeded(config.seed, f"towers.{tower.name}"):
        module: Tower = kind(params, dense_dim + zero_columns, chosen_dims)
        out_dim = module.out_dim
        above = module.lift(tower.cut_at) if tower.cut_at else None
        block = TowerBlock(
            module,
            ColumnSelection(dense, num_dense),
            ColumnSelection(columns, starts[-1]),
            tower.inputs.towers,
            head=head_kind(head_kind.Config(**tower.head.params), module.out_dim),
            zero_columns=zero_columns,
            frozen=tower.frozen,
        )
    has_loss = tower.loss is not None and tower.loss.weight > 0
    if not has_loss and config.over_arch.logits == "none":
        block.get_submodule("head").requires_grad_(False)
    return block, out_dim, above


def _zero_columns(params: TowerParams, dense_dim: int, embedding_dims: Sequence[int]) -> int:
    """How many zero columns follow a tower's dense input: see :class:`TowerBlock`."""
    missing = missing_columns(dense_dim + sum(embedding_dims))
    widens = params.output_dim(dense_dim + missing, embedding_dims) != params.output_dim(dense_dim, embedding_dims)
    # A tower without dense columns gets none: it would build the parts that it has for dense features only.
    return 0 if dense_dim == 0 or widens else missing


def _chosen(inputs: bool | Sequence[str], names: Sequence[str]) -> list[int]:
    """Positions of the features that a tower reads, in feature order."""
    if isinstance(inputs, bool):
        return list(range(len(names))) if inputs else []
    return [position for position, name in enumerate(names) if name in inputs]

"""What a model asks for, whatever it runs on: its tables with their places, and the work of its dense part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from erase_rec.distributed.table_plan import TablePlan

FLOAT_BYTES = 4
ID_BYTES = 8
STATE_VALUES = {"rowwise_adagrad": 0, "adagrad": 1, "adam": 2, "sgd": 0}
"""Float32 values that the optimizer keeps beside each weight of a table; ``rowwise_adagrad`` keeps one a row."""
CACHE_SHARE = 0.2
"""Rows that ``fused_uvm_caching`` holds on the device where ``cache_share`` says nothing: FBGEMM's default."""


@dataclass(frozen=True)
class TableDemand:
    """A table, and where it lies.

    Attributes:
        name: the feature's name.
        plan: rows, columns and places; sharding may also be ``replicated``.
        ids_per_row: mean ids that a row of a batch looks up.
        cache_share: of its rows that ``fused_uvm_caching`` holds on the device.
    """

    name: str
    plan: TablePlan
    ids_per_row: float
    cache_share: float = CACHE_SHARE


@dataclass(frozen=True)
class BlockDemand:
    """A tower or the over-arch.

    Attributes:
        name: of the block.
        early: its backward is launched before the over-arch.
        forward_share: of the arithmetic of all blocks' forwards.
        chunk_bytes: of each gradient buffer that is averaged as a whole.
    """

    name: str
    early: bool
    forward_share: float
    chunk_bytes: tuple[int, ...]


@dataclass(frozen=True)
class ModelDemand:
    """A model and how it is trained.

    Attributes:
        tables: one a sparse feature.
        blocks: towers in the order of launch, then the over-arch.
        rows: of a step on one rank.
        parts: that they are cut into (``train.micro_batches``).
        compute_bytes: of a value that towers compute in.
        sparse_optimizer: its kind.
        dense_states: float32 values that the dense optimizer keeps a parameter.
        parameters: trained dense ones.
        activations: values that a row's dense forward keeps for the backward.
        flops: arithmetic of a step on one rank.
        dense_bytes: memory traffic of a step on one rank, without the tables' rows.
        row_bytes: memory traffic of an id of each table: lookup and update.
        joint: early backwards wait for all towers' logits.
        reduction: ``bucket``, ``ddp`` or ``ddp_per_tower``.
        weighted: ids have weights.
        single_valued: every bag holds one id.
        cuda_graph: what of a step is captured: ``none``, ``tower``, ``dense`` (all but spread tables) or ``step``.
    """

    tables: Sequence[TableDemand]
    blocks: Sequence[BlockDemand]
    rows: int
    parts: int
    compute_bytes: int
    sparse_optimizer: str
    dense_states: int
    parameters: int
    activations: float
    flops: float
    dense_bytes: float
    row_bytes: Sequence[float]
    joint: bool
    reduction: str
    weighted: bool
    single_valued: bool
    cuda_graph: str

    @property
    def id_bytes(self) -> int:
        """Bytes of an id that is sent, with its weight."""
        return ID_BYTES + (FLOAT_BYTES if self.weighted else 0)

    @property
    def early(self) -> bool:
        """Whether any block's backward is launched early."""
        return any(block.early for block in self.blocks)

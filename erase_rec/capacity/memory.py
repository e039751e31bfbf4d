"""Memory of a rank, part by part.

=================  ================================================================================================
``tables``         float32 weights of the rank's parts; a ``fused_uvm_caching`` part takes its cache's share
``table states``   of the sparse optimizer: 4 bytes a row (``rowwise_adagrad``), or 4 or 8 bytes a weight
``dense``          float32 master weights and copies in the computing dtype; optimizer state; gradients, once in the
                   computing dtype and once as the float32 buffer that is averaged
``activations``    what a forward of the plain form keeps for its backward, of one micro-batch
``exchange``       pooled rows on their way (float32 of all ranks' rows for what the rank holds, and of its own rows),
                   once more as gradients; ids that came
``reserve``        given: CUDA and NCCL, pools of captured graphs, fragments
=================  ================================================================================================

Host memory holds the rows of ``fused_uvm`` and ``fused_uvm_caching`` with their state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from erase_rec.capacity.demand import FLOAT_BYTES, ID_BYTES, STATE_VALUES, ModelDemand
from erase_rec.capacity.traffic import SPREAD, columns_held
from erase_rec.distributed.table_plan import Place

GIB = 2**30


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds.

    Attributes:
        rank: its number.
        device: bytes of the GPU by part.
        host: bytes of tables in the node's memory.
    """

    rank: int
    device: Mapping[str, int]
    host: int

    @property
    def gib(self) -> float:
        """Of the GPU, in all."""
        return sum(self.device.values()) / GIB


def memory_of_ranks(model: ModelDemand, ranks: int, reserve_gib: float) -> list[RankMemory]:
    """What each rank holds."""
    weights, states, host = [0] * ranks, [0] * ranks, [0] * ranks
    for table in model.tables:
        for place in table.plan.places:
            weight, state = part_bytes(place, model.sparse_optimizer)
            on_device = {"fused_uvm": 0.0, "fused_uvm_caching": table.cache_share}.get(table.plan.kernel, 1.0)
            weights[place.rank] += round(weight * on_device)
            states[place.rank] += round(state * on_device)
            host[place.rank] += weight + state if on_device < 1 else 0
    exchange = _exchange(model, ranks)
    shared = {
        "dense": dense_bytes(model),
        "activations": round(model.activations * model.rows / model.parts * model.compute_bytes),
    }
    return [
        RankMemory(
            rank,
            {
                "tables": weights[rank],
                "table states": states[rank],
                **shared,
                "exchange": exchange[rank],
                "reserve": round(reserve_gib * GIB),
            },
            host[rank],
        )
        for rank in range(ranks)
    ]


def part_bytes(place: Place, optimizer: str) -> tuple[int, int]:
    """Weights and optimizer state of a part of a table."""
    rows = place.rows[1] - place.rows[0]
    weight = FLOAT_BYTES * rows * (place.columns[1] - place.columns[0])
    state = FLOAT_BYTES * rows if optimizer == "rowwise_adagrad" else STATE_VALUES[optimizer] * weight
    return weight, state


def dense_bytes(model: ModelDemand) -> int:
    """Weights, optimizer state and gradients of the dense part."""
    copies = 0 if model.compute_bytes == FLOAT_BYTES else model.compute_bytes
    per_parameter = FLOAT_BYTES + copies + FLOAT_BYTES * model.dense_states + model.compute_bytes + FLOAT_BYTES
    return per_parameter * model.parameters


def _exchange(model: ModelDemand, ranks: int) -> Sequence[int]:
    """Pooled rows, their gradients and ids, by rank."""
    own = model.rows * sum(table.plan.dim for table in model.tables) * model.compute_bytes
    ids = model.rows * sum(table.ids_per_row for table in model.tables) * ID_BYTES
    shared = 2 * own + 2 * ids  # of this batch and the next
    whole = [table for table in model.tables if table.plan.sharding == "replicated"]
    shared += 2 * ranks * model.rows * sum(table.plan.dim for table in whole) * model.compute_bytes
    copied = [table.plan for table in model.tables if table.plan.sharding == "data_parallel"]
    shared += sum(FLOAT_BYTES * plan.rows * (plan.dim + 1) for plan in copied)
    spread = [table for table in model.tables if table.plan.sharding in SPREAD]
    cell = FLOAT_BYTES * model.rows
    shared += 2 * cell * sum(table.plan.dim for table in spread)
    return [round(shared) + 2 * ranks * cell * columns for columns in columns_held(spread, ranks)]

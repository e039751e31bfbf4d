"""The collectives of one training step, with the bytes that each rank gives.

Counted as the log of collectives counts (:mod:`erase_rec.distributed.collective_log`), under the same groups. B rows a
rank, W ranks, D columns of a table, n ids of its bags:

===================  ==============================================================================================
``replicated``       all-gathers of ids (and lengths) and of the pooled gradients of all tables
``data_parallel``    an all-reduce of rows x (D + 1) floats for all tables of one D
``table_wise``       ids and lengths to the owner; W B D floats from it; B D floats of gradient back
``column_wise``      the same for each part, of its columns
``row_wise``         ids to the rank of their row, lengths to all; sums over its rows from every rank, W B D floats,
                     of which a reduce-scatter leaves B D; B D floats of gradient to all
===================  ==============================================================================================

Dense gradients are a buffer a block, cut where it is large. Announcements of sizes, some dozens of bytes, are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from erase_rec.capacity.cluster import Cluster, Kind
from erase_rec.capacity.demand import FLOAT_BYTES, ID_BYTES, ModelDemand, TableDemand

INPUT, EXCHANGE, GRADIENT = "tables.input", "tables.exchange", "tables.gradient"
SPREAD = ("table_wise", "row_wise", "column_wise")


@dataclass(frozen=True)
class Transfer:
    """One collective of a step.

    Attributes:
        group: as in the log of collectives.
        kind: what is done.
        given: bytes, by rank.
    """

    group: str
    kind: Kind
    given: tuple[int, ...]

    def ms(self, cluster: Cluster) -> float:
        """Its time: that of the rank which gives most."""
        return cluster.collective_ms(self.kind, max(self.given))


def of_dense(model: ModelDemand, ranks: int) -> list[tuple[str, Transfer]]:
    """The reductions, each with the block whose gradients it holds; none on one rank."""
    if ranks == 1:
        return []
    return [
        (block.name, Transfer(f"{block.name}.{at}", "all_reduce", (count,) * ranks))
        for block in model.blocks
        for at, count in enumerate(block.chunk_bytes)
    ]


def of_tables(model: ModelDemand, ranks: int) -> list[Transfer]:
    """The tables' collectives in the order of a step; none on one rank."""
    if ranks == 1:
        return []
    whole = [table for table in model.tables if table.plan.sharding == "replicated"]
    copied = [table for table in model.tables if table.plan.sharding == "data_parallel"]
    spread = [table for table in model.tables if table.plan.sharding in SPREAD]
    before, after = _replicated(model, whole, ranks) if whole else ([], [])
    if spread:
        spread_before, spread_after = _spread(model, spread, ranks)
        before, after = before + spread_before, after + spread_after
    return before + after + _copied(copied, ranks)


def _replicated(model: ModelDemand, tables: Sequence[TableDemand], ranks: int) -> tuple[list[Transfer], list[Transfer]]:
    ids = round(sum(table.ids_per_row for table in tables) * model.rows)
    sent = {"ids": ID_BYTES * ids}
    if not model.single_valued:
        sent["lengths"] = FLOAT_BYTES * model.rows * len(tables)
    if model.weighted:
        sent["weights"] = FLOAT_BYTES * ids
    gradient = model.rows * sum(table.plan.dim for table in tables) * model.compute_bytes
    return (
        [Transfer(f"tables.{name}", "all_gather", (count,) * ranks) for name, count in sent.items()],
        [Transfer(GRADIENT, "all_gather", (gradient,) * ranks)],
    )


def _spread(model: ModelDemand, tables: Sequence[TableDemand], ranks: int) -> tuple[list[Transfer], list[Transfer]]:
    by_row = [table for table in tables if table.plan.sharding == "row_wise"]
    others = [table for table in tables if table.plan.sharding != "row_wise"]
    ids = sum(_ids_sent(model, table, ranks) for table in tables)
    before, after = [Transfer(INPUT, "all_to_all", (ids,) * ranks)], []
    cell = FLOAT_BYTES * model.rows
    if others:
        pooled = [cell * ranks * columns for columns in columns_held(others, ranks)]
        before.append(Transfer(EXCHANGE, "all_to_all", tuple(pooled)))
        after.append(Transfer(GRADIENT, "all_to_all", (cell * _columns(others),) * ranks))
    if by_row:
        before.append(Transfer(EXCHANGE, "reduce_scatter", (cell * ranks * _columns(by_row),) * ranks))
        after.append(Transfer(GRADIENT, "all_gather", (cell * _columns(by_row),) * ranks))
    return before, after


def _ids_sent(model: ModelDemand, table: TableDemand, ranks: int) -> int:
    """Ids of rows go to the rank of their row, and ids of columns to each part, with the bags' lengths."""
    parts = len(table.plan.places)
    copies, lengths = (1, ranks) if table.plan.sharding == "row_wise" else (parts, parts)
    return copies * round(table.ids_per_row * model.rows) * model.id_bytes + lengths * model.rows * FLOAT_BYTES


def _copied(tables: Sequence[TableDemand], ranks: int) -> list[Transfer]:
    rows_of: defaultdict[int, int] = defaultdict(int)
    for table in tables:
        rows_of[table.plan.dim] += table.plan.rows
    return [
        Transfer(f"tables.whole.{at}", "all_reduce", (FLOAT_BYTES * rows * (dim + 1),) * ranks)
        for at, (dim, rows) in enumerate(rows_of.items())
    ]


def columns_held(tables: Sequence[TableDemand], ranks: int) -> list[int]:
    """Columns of all ``tables`` by the rank that holds them."""
    held = [0] * ranks
    for table in tables:
        for place in table.plan.places:
            held[place.rank] += place.columns[1] - place.columns[0]
    return held


def _columns(tables: Sequence[TableDemand]) -> int:
    return sum(table.plan.dim for table in tables)

"""Which rank holds what of each embedding table: plain numbers, for people and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

SHOWN_TABLES = 12
"""The largest tables, which :meth:`ShardingPlan.text` lists."""
_CELL_BYTES = 4


@dataclass(frozen=True)
class Place:
    """A part of a table: half-open ranges of its rows and columns, on a rank."""

    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True)
class TablePlan:
    """How one table is spread.

    Attributes:
        rows: of the whole table.
        dim: its columns.
        sharding: ``table_wise``, ``row_wise``, ``column_wise`` or ``data_parallel``.
        kernel: FBGEMM's kernel; ``torch`` for copies.
        places: its parts; for copies one a rank.
    """

    rows: int
    dim: int
    sharding: str
    kernel: str
    places: tuple[Place, ...]

    def mib(self, rank: int) -> float:
        """MiB of float32 weights on ``rank``."""
        mine = [place for place in self.places if place.rank == rank]
        cells = sum((place.rows[1] - place.rows[0]) * (place.columns[1] - place.columns[0]) for place in mine)
        return cells * _CELL_BYTES / 2**20

    def summary(self) -> str:
        """Sharding, kernel and ranks, in some words."""
        ranks = sorted({place.rank for place in self.places})
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return f"{self.sharding} ({self.kernel}), {where}"


@dataclass(frozen=True)
class ShardingPlan:
    """The plan of all tables.

    Attributes:
        world_size: ranks that it is for.
        tables: by feature name.
    """

    world_size: int
    tables: Mapping[str, TablePlan]

    def text(self) -> str:
        """For the terminal: what a rank holds, and the largest tables."""
        totals = [sum(plan.mib(rank) for plan in self.tables.values()) for rank in range(self.world_size)]
        lines = [
            f"{len(self.tables)} tables over {self.world_size} ranks; weights of a rank: {min(totals):,.2f} to "
            f"{max(totals):,.2f} MiB"
        ]
        by_size = sorted(self.tables.items(), key=lambda entry: -entry[1].rows * entry[1].dim)
        shown = by_size[:SHOWN_TABLES]
        width = max(len(name) for name, _ in shown)
        sizes = [f"{plan.rows:,} x {plan.dim}" for _, plan in shown]
        lines += [
            f"  {name:<{width}}  {size:>{max(map(len, sizes))}}  {plan.summary()}"
            for (name, plan), size in zip(shown, sizes, strict=True)
        ]
        if len(by_size) > len(shown):
            lines.append(f"  and {len(by_size) - len(shown)} smaller ones, see sharding_plan.json")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Writes world size and tables as JSON."""
        content = {"world_size": self.world_size, "tables": {name: asdict(plan) for name, plan in self.tables.items()}}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

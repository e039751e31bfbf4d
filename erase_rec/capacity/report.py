"""A capacity plan for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from erase_rec.capacity.demand import TableDemand
from erase_rec.capacity.memory import GIB
from erase_rec.capacity.plan import DAY_S, CapacityPlan
from erase_rec.distributed.table_plan import TablePlan
from erase_rec.text_table import TextTable

SHOWN_TABLES = 16
MIB = 2**20


def tables(plan: CapacityPlan) -> list[TextTable]:
    """Placement, memory, bytes and time."""
    found = [_placement(plan), _memory(plan)]
    if plan.cluster.ranks > 1:
        found.append(_traffic(plan))
    return [*found, _time(plan)]


def sentences(plan: CapacityPlan) -> Iterator[str]:
    """What follows from it."""
    time = plan.time
    rows = plan.model.rows * plan.cluster.ranks
    yield f"speed: {rows:,} rows a step of {time.step_ms:.3f} ms are {plan.rows_per_s:,.0f} rows/s"
    if plan.rows_per_day is not None and plan.hours_a_day is not None:
        yield (
            f"a day's {plan.rows_per_day:,} rows ({plan.rows_per_day / DAY_S:,.0f} rows/s) take "
            f"{plan.hours_a_day:,.2f} hours: it keeps up, where data are read as fast"
        )
    if time.reduction_ms:
        yield (
            f"reductions of dense gradients take {time.reduction_ms:.3f} ms, "
            f"of which {time.hidden_ms:.3f} ms run beside compute; were none hidden, a step would take "
            f"{time.longest_ms:.3f} ms"
        )
    yield f"first limit: {plan.first_limit()}"
    if plan.host_gib:
        yield "note: rows in host memory come over PCIe, whose time is not counted"
    uncaptured = {"step": None, "dense": "the part of spread tables"}.get(plan.model.cuda_graph, "all of it")
    if uncaptured is not None:
        yield (
            f"note: this is the device's time; {uncaptured} is launched kernel by kernel, where the host may set a "
            "slower pace"
        )


def _placement(plan: CapacityPlan) -> TextTable:
    by_size = sorted(plan.model.tables, key=lambda table: -table.plan.rows * table.plan.dim)
    rows = [
        (
            table.name,
            f"{table.plan.rows:,} x {table.plan.dim}",
            f"{4 * table.plan.rows * table.plan.dim / GIB:,.3f}",
            f"{table.plan.sharding} ({table.plan.kernel})",
            _where(table.plan, plan.cluster.ranks),
        )
        for table in by_size[:SHOWN_TABLES]
    ]
    if len(by_size) > SHOWN_TABLES:
        rest = by_size[SHOWN_TABLES:]
        gib = sum(4 * table.plan.rows * table.plan.dim for table in rest) / GIB
        rows.append((f"and {len(rest)} smaller", "", f"{gib:,.3f}", ", ".join(_kinds(rest)), "see --out"))
    title = (
        f"Tables: {plan.table_parameters():,} parameters, "
        f"{4 * plan.table_parameters() / GIB:,.1f} GiB, on {plan.cluster.ranks} ranks of {plan.cluster.nodes} nodes"
    )
    return TextTable(title, ("table", "rows x columns", "GiB", "placement", "where"), tuple(rows))


def _kinds(tables: Sequence[TableDemand]) -> list[str]:
    counts: dict[str, int] = {}
    for table in tables:
        counts[table.plan.sharding] = counts.get(table.plan.sharding, 0) + 1
    return [f"{count} {kind}" for kind, count in counts.items()]


def _where(plan: TablePlan, ranks: int) -> str:
    if plan.sharding in {"replicated", "data_parallel"}:
        return "all of it on every rank"
    holders = sorted({place.rank for place in plan.places})
    first = plan.places[0]
    part = f"{first.rows[1] - first.rows[0]:,} x {first.columns[1] - first.columns[0]}"
    if len(holders) == 1:
        return f"rank {holders[0]}"
    where = "every rank" if len(holders) == ranks else f"{len(holders)} ranks"
    return f"{part} on {where}"


def _memory(plan: CapacityPlan) -> TextTable:
    fullest, emptiest = plan.fullest, min(plan.memory, key=lambda each: each.gib)
    rows = [
        (name, f"{count / GIB:,.2f}", f"{emptiest.device[name] / GIB:,.2f}") for name, count in fullest.device.items()
    ]
    rows.append(("in all", f"{fullest.gib:,.2f}", f"{emptiest.gib:,.2f}"))
    if plan.host_gib:
        rows.append(("host memory of the fullest node", f"{plan.host_gib:,.2f}", ""))
    title = f"Memory of a GPU, GiB of {plan.cluster.hbm_gib:,.0f}"
    return TextTable(title, ("part", f"rank {fullest.rank}, fullest", f"rank {emptiest.rank}, emptiest"), tuple(rows))


def _traffic(plan: CapacityPlan) -> TextTable:
    rows = [
        (
            name,
            f"{row['count']:.0f}",
            f"{row['given'] / MIB:,.3f}",
            f"{row['passed_on'] / MIB:,.3f}",
            f"{row['over_network'] / MIB:,.3f}",
            f"{row['ms']:.3f}",
        )
        for name, row in plan.bytes_by_group().items()
    ]
    header = ("collectives", "a step", "given, MiB", "sent, MiB", "over the network, MiB", "ms")
    return TextTable("Communication of the busiest rank in a step", header, tuple(rows))


def _time(plan: CapacityPlan) -> TextTable:
    time = plan.time
    rows = [(name, f"{ms:.3f}", f"{100 * ms / time.step_ms:.0f} %") for name, ms in time.terms().items()]
    rows.append(("step", f"{time.step_ms:.3f}", ""))
    title = (
        f"Expected step of {plan.model.rows:,} rows a rank; compute from {time.flops_ms:.3f} ms of arithmetic "
        f"and {time.bytes_ms:.3f} ms of memory traffic"
    )
    return TextTable(title, ("term", "ms", "share"), tuple(rows))

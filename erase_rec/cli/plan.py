"""``erase-rec plan``: what a training takes on machines that are not there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from erase_rec.capacity.cluster import GPUS_OF_A_NODE, MOST_RANKS, Cluster
from erase_rec.errors import UserError

if TYPE_CHECKING:  # loaded after the command line was checked
    from erase_rec.capacity.plan import CapacityPlan


def command(
    config: Annotated[str, typer.Option("--config", help="A YAML file: the model.")],
    world_size: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Ranks, one a GPU.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines; by default of 8 GPUs each.")] = None,
    hbm_gib: Annotated[float, typer.Option(min=0.1, help="Memory of a GPU.")] = Cluster.hbm_gib,
    host_gib: Annotated[float, typer.Option(min=0, help="Memory of a node that tables may use.")] = Cluster.host_gib,
    reserve_gib: Annotated[
        float, typer.Option(min=0, help="Of a GPU's memory, for CUDA, NCCL, pools of graphs and fragments.")
    ] = 4.0,
    tflops: Annotated[
        float, typer.Option(min=0.001, help="Of matrix products, reached, 10^12 a second.")
    ] = Cluster.flops_per_s / 1e12,
    hbm_gb_s: Annotated[
        float, typer.Option(min=0.001, help="Bandwidth of a GPU's memory, reached.")
    ] = Cluster.memory_bytes_per_s / 1e9,
    link_gb_s: Annotated[
        float, typer.Option(min=0.001, help="Of a GPU to those of its node, one direction.")
    ] = Cluster.link_bytes_per_s / 1e9,
    network_gb_s: Annotated[
        float, typer.Option(min=0.001, help="Of a GPU to other nodes, one direction.")
    ] = Cluster.network_bytes_per_s / 1e9,
    latency_us: Annotated[float, typer.Option(min=0, help="Of a collective on one node.")] = Cluster.latency_us,
    rows_per_day: Annotated[int | None, typer.Option(min=1, help="Rows that come in a day: does it keep up?")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write all of it as JSON here.")] = None,
) -> None:
    """Say where tables would lie, what memory, network and time a step would take, and what is used up first.

    Needs no GPU and no data. The machine is an NVIDIA H200 in a DGX H200 where no option says otherwise.
    """
    if out is not None and out.suffix != ".json":
        raise UserError(f"--out: expected the name of a JSON file, found {out}; write --out {out.with_suffix('.json')}")
    numbers = {
        "hbm-gib": hbm_gib, "host-gib": host_gib, "reserve-gib": reserve_gib, "tflops": tflops, "hbm-gb-s": hbm_gb_s,
        "link-gb-s": link_gb_s, "network-gb-s": network_gb_s, "latency-us": latency_us,
    }  # fmt: skip
    if endless := [f"--{name}" for name, number in numbers.items() if not math.isfinite(number)]:
        raise UserError(f"{', '.join(endless)}: found inf, expected a finite number; give what the machine has")
    if reserve_gib >= hbm_gib:
        raise UserError(
            f"--reserve-gib: {reserve_gib:g} GiB leave nothing of a GPU's {hbm_gib:g} (--hbm-gib); "
            "give a smaller reserve"
        )
    if nodes is None:
        nodes = max(1, -(-world_size // GPUS_OF_A_NODE))
    if world_size % nodes:
        raise UserError(f"--nodes: {nodes} nodes cannot have as many of {world_size} ranks each; give a divisor of it")
    cluster = Cluster(
        world_size, nodes, hbm_gib, host_gib, hbm_gb_s * 1e9, tflops * 1e12, link_gb_s * 1e9, network_gb_s * 1e9,
        latency_us,
    )  # fmt: skip

    from erase_rec.api.assembly import ContentCatalog
    from erase_rec.cli.plan_workshop import plan_capacity
    from erase_rec.config.load import load_config

    loaded = load_config(config, overrides or [], catalog=ContentCatalog()).config
    found = plan_capacity(loaded, cluster, reserve_gib=reserve_gib, rows_per_day=rows_per_day)
    _show(found)
    if out is not None:
        _write(found, out)


def _show(plan: CapacityPlan) -> None:
    from erase_rec.capacity.report import sentences, tables
    from erase_rec.text_table import table_console

    console = table_console()
    for table in tables(plan):
        console.print(table.rich())
    for sentence in sentences(plan):
        typer.echo(sentence)


def _write(plan: CapacityPlan, out: Path) -> None:
    try:
        out.write_text(json.dumps(plan.as_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror or error}") from error
    typer.echo(f"wrote {out}")

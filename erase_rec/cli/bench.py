"""``erase-rec bench``: step time of several ways to train one model, interleaved in one process."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # loaded after the command line was checked
    import numpy as np
    from numpy.typing import NDArray

    from erase_rec.bench.result import Row


def command(
    config: Annotated[str, typer.Option("--config", help="A YAML file: the workload.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
    arms: Annotated[str, typer.Option(help="Comma-separated names; all arms where none is given.")] = "",
    batch: Annotated[str, typer.Option(help="Comma-separated rows of a step; the configuration's by default.")] = "",
    repeats: Annotated[int, typer.Option(min=5, help="Turns of each arm.")] = 12,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a turn.")] = 50,
    warmup: Annotated[int, typer.Option(min=1, help="Steps of each arm before the first turn.")] = 20,
    data: Annotated[
        Literal["resident", "loader"],
        typer.Option(help="Random batches on the device, or those of training as its loader makes them."),
    ] = "resident",
    zipf: Annotated[float, typer.Option(min=0.0, help="resident: exponent of the ids' popularity; 0: all alike.")] = 0,
    arms_file: Annotated[Path | None, typer.Option(help="Arms; configs/bench/arms.yaml by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write rows as JSON here, and a picture beside it.")] = None,
) -> None:
    """Time training steps of several arms that take turns (A B B A); the first arm is there twice, as A/A pair."""
    from erase_rec.api.assembly import ContentCatalog
    from erase_rec.bench.arms import SHIPPED_ARMS, choose_arms, plan_arms, read_arms

    if out is not None and out.suffix != ".json":
        raise UserError(f"--out: expected the name of a JSON file, found {out}; write --out {out.with_suffix('.json')}")
    chosen = choose_arms(read_arms(arms_file or SHIPPED_ARMS), [name for name in arms.split(",") if name])
    planned = plan_arms(config, overrides or [], chosen, _sizes(batch), catalog=ContentCatalog())

    from erase_rec.cli.bench_workshop import Source, run_bench

    def keep(rows: Sequence[Row], about: Mapping[str, Any]) -> None:
        if out is not None:
            _save(rows, {**about, "command": shlex.join(["erase-rec", *sys.argv[1:]])}, out)

    source = Source(data == "resident", zipf)
    rows = run_bench(config, overrides or [], planned, source, repeats=repeats, steps=steps, warmup=warmup, keep=keep)
    if rows:  # on the first rank
        _present(rows, out)


def speed_interval(reference: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float, float]:
    """Speed relative to the reference: mean of paired log-ratios and its 95 % interval, by a studentized bootstrap."""
    import numpy as np

    from eval.statistics import studentized_bootstrap

    logs = studentized_bootstrap(np.log(reference / times))
    with np.errstate(over="ignore"):  # few turns that nearly agree may leave a bound open: infinite
        low, mid, high = np.exp([logs.low, logs.mid, logs.high]).tolist()
    return low, mid, high


def _sizes(batch: str) -> list[int]:
    """Rows of a step, from a comma-separated list.

    Raises:
        UserError: one is no positive whole number, or is there twice.
    """
    parts = [part.strip() for part in batch.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdecimal() or int(part) == 0 or parts.count(part) > 1]
    if wrong:
        raise UserError(f"--batch: expected different positive whole numbers such as 512,1024; found {batch!r}")
    return [int(part) for part in parts]


def _save(rows: Sequence[Row], about: Mapping[str, Any], out: Path) -> None:
    """Writes the rows, and a picture of them.

    Raises:
        UserError: a file cannot be written.
    """
    from erase_rec.bench.picture import save_picture
    from erase_rec.bench.result import write_json

    try:
        write_json(out, rows, about)
        save_picture(out.with_suffix(".png"), rows)
    except OSError as error:
        raise UserError(f"bench: cannot write {error.filename}: {error.strerror}") from error


def _present(rows: Sequence[Row], out: Path | None) -> None:
    """Tables, and where the files are.

    Raises:
        UserError: no arm ran.
    """
    from erase_rec.bench.result import kernel_table, strongest_early, strongest_exact, tables
    from erase_rec.text_table import table_console

    console = table_console()
    for table in tables(rows):
        console.print(table.rich())
    largest = [row for row in rows if row.batch == rows[-1].batch]
    for row in (strongest_exact(largest), strongest_early(largest)):
        if row is not None and row.top_kernels:
            console.print(kernel_table(row).rich())
    if out is not None:
        console.print(f"wrote {out} and {out.with_suffix('.png')}", soft_wrap=True)
    if all(row.refused is not None for row in rows):
        raise UserError("bench: no arm could be run here; the reasons are above")

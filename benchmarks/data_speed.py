"""Speed of the data's way, all contestants in turn: prepare beside FuxiCTR, the parsers, the loader, streaming.

    python benchmarks/data_speed.py --out data-speed.json [--peer-python P] [--engines-python P]

Writes made-up Criteo rows to a temporary folder first (``erase-rec synth``). Every round runs every contestant once, in
turns forwards and backwards, so that a slower minute of the machine hits them all; compare medians and ratios of one
run only. A preparation is timed as a user waits for it, from the start of the command to its end, and besides with the
time of preparing the first 1,000 rows taken off, as FuxiCTR is timed without its start; the loader over one epoch to
host tensors. How the peers are installed: benchmarks/peers/README.md.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.dataset import Datasets, build_datasets
from data.reading import open_train
from erase_rec import environment
from erase_rec.api.assembly import ContentCatalog
from erase_rec.cli.main import run
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[1]
PEERS = CHECKOUT / "benchmarks" / "peers"
HASH = (
    "features.sparse_defaults.encoding=hash",
    "features.sparse_defaults.num_embeddings=1000000",
    "features.sparse_defaults.min_count=null",
)
VOCABULARY = ("features.sparse_defaults.encoding=vocabulary", "features.sparse_defaults.min_count=10")
PARQUET = ("data.kind=parquet", "data.label.column=label")
BATCH_ROWS = 4096
ENGINES = ("Arrow, runs of 1 MiB", "Arrow, runs of 8 MiB", "polars", "DuckDB")
START_ROWS = 1000
START = f"prepare, hash, {START_ROWS:,} rows"


@dataclass
class Contestant:
    """What is measured.

    Attributes:
        name: shown.
        measure: runs once; rows a second.
        starts: rows of a preparation, whose start-up is told apart; 0: something else.
        found: a number a round.
        cpu_s: seconds of all cores that a preparation took, a number a round; empty: something else.
    """

    name: str
    measure: Callable[[], float]
    starts: int = 0
    found: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def erase_rec(*arguments: str) -> float:
    """Runs a command as a user does; seconds.

    Raises:
        UserError: it fails; holds its output.
    """
    start_s = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-m", "erase_rec", *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - start_s
    if result.returncode:
        raise UserError(
            f"erase-rec {' '.join(arguments)} ended with code {result.returncode}:\n{result.stderr[-2000:]}"
        )
    return seconds


def peer(python: Path, script: str, *arguments: str) -> dict[str, float | str]:
    """The JSON that a script of ``benchmarks/peers`` prints as its last line.

    Raises:
        UserError: it fails; holds its output.
    """
    result = subprocess.run([str(python), str(PEERS / script), *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(f"{script} with {python} ended with code {result.returncode}:\n{result.stderr[-2000:]}")
    found: dict[str, float | str] = json.loads(result.stdout.splitlines()[-1])
    return found


def prepare(folder: Path, workers: int, *overrides: str) -> float:
    """Prepares into a folder that is removed first; seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()  # what was written before is not to be flushed during the measurement
    return erase_rec(
        *("prepare", "--config", "ctr_criteo.yaml", "--out", str(folder), "--workers", str(workers)), *overrides
    )


def cpu_seconds() -> float:
    """What the children that have ended took of all cores, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepared(name: str, source: Path, rows: int, folder: Path, workers: int, overrides: tuple[str, ...]) -> Contestant:
    """``erase-rec prepare`` of ``source``."""
    cpu_s: list[float] = []

    def measure() -> float:
        before_s = cpu_seconds()
        seconds = prepare(folder, workers, f"data.train={source}", *overrides)
        cpu_s.append(cpu_seconds() - before_s)
        return rows / seconds

    return Contestant(name, measure, rows, cpu_s=cpu_s)


def head(source: Path) -> Path:
    """The first ``START_ROWS`` rows."""
    path = source.with_name("head.tsv")
    with source.open("rb") as lines:
        path.write_bytes(b"".join(itertools.islice(lines, START_ROWS)))
    return path


def fuxictr(python: Path, source: Path, rows: int, folder: Path) -> Contestant:
    """FuxiCTR's preprocessing of ``source``, with the vocabulary's threshold."""

    def measure() -> float:
        shutil.rmtree(folder, ignore_errors=True)
        found = peer(python, "fuxictr_prepare.py", "--input", str(source), "--out", str(folder), "--min-count", "10")
        return rows / float(found["s"])

    version = subprocess.run(
        [str(python), "-c", "import importlib.metadata as m; print(m.version('fuxictr'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return Contestant(f"FuxiCTR {version.stdout.strip()}", measure)


def engine(python: Path, name: str, source: Path) -> Contestant:
    """A parser of ``parse_engines.py``."""

    def measure() -> float:
        found = peer(python, "parse_engines.py", "--input", str(source), "--engine", name)
        return float(found["rows"]) / float(found["s"])

    return Contestant(f"parse: {name}", measure)


def config_of(*overrides: str) -> Config:
    """``ctr_criteo.yaml`` with overrides."""
    return load_config("ctr_criteo.yaml", list(overrides), catalog=ContentCatalog()).config


def scan(source: Path, rows: int) -> Contestant:
    """What one process does for all workers: it hashes the file and finds where chunks end."""

    def measure() -> float:
        start_s = time.perf_counter()
        for _ in open_train(config_of(f"data.train={source}")).chunks():
            pass
        return rows / (time.perf_counter() - start_s)

    return Contestant("scan", measure)


class EpochReader:
    """Reads an epoch of training batches after the other."""

    def __init__(self, data: Datasets) -> None:
        """Reads one epoch first: memory-mapped files are then in the page cache."""
        self._loader, self._epoch = data.train, 0
        self()

    def __call__(self) -> float:
        """Rows a second of the next epoch."""
        start_s, rows = time.perf_counter(), 0
        for batch in self._loader.batches(self._epoch):
            rows += batch.size
        self._epoch += 1
        return rows / (time.perf_counter() - start_s)


def contestants(
    folder: Path, rows: int, many_rows: int, loader_rows: int, workers: int, peers: list[Path], engines: Path | None
) -> list[Contestant]:
    """Makes the files and whoever reads them."""
    for name, count in (("text", rows), ("many", many_rows)):
        erase_rec("synth", "--rows", str(count), "--eval-rows", "0", "--out", str(folder / name))
    erase_rec(
        *(
            "synth",
            "--rows",
            str(loader_rows),
            "--eval-rows",
            "0",
            "--format",
            "parquet",
            "--out",
            str(folder / "parquet"),
        )
    )
    text, parquet = folder / "text" / "train-00000.tsv", folder / "parquet" / "train-00000.parquet"
    many = folder / "many" / "train-00000.tsv"
    found = [
        prepared(START, head(text), START_ROWS, folder / "start", workers, HASH),
        prepared("prepare, hash", text, rows, folder / "prepared", workers, HASH),
        prepared("prepare, vocabulary 10", text, rows, folder / "prepared", workers, VOCABULARY),
        prepared(f"prepare, hash, {many_rows:,} rows", many, many_rows, folder / "prepared", workers, HASH),
        prepared(
            f"prepare, vocabulary 10, {many_rows:,} rows", many, many_rows, folder / "prepared", workers, VOCABULARY
        ),
        scan(many, many_rows),
        *(fuxictr(python, text, rows, folder / f"peer-{index}") for index, python in enumerate(peers)),
        *(engine(engines, name, text) for name in ENGINES if engines is not None),
    ]
    big = folder / "big"
    prepare(big, workers, f"data.train={parquet}", *PARQUET, *HASH)
    reading = (f"data.train={parquet}", *PARQUET, *HASH, f"train.local_batch_size={BATCH_ROWS}")
    for threads in (0, 1, 2):
        data = build_datasets(config_of(*reading, f"data.prepared={big}", f"data.workers={threads}"))
        found.append(Contestant(f"loader, prepared, {threads} workers", EpochReader(data)))
    data = build_datasets(config_of(*reading, "data.reading=stream", "data.workers=0"))
    found.append(Contestant("stream from Parquet, 0 workers", EpochReader(data)))
    return found


def table(found: list[Contestant]) -> str:
    """Markdown: median and range of rows a second, the median without start-up, and the ratio to the fastest FuxiCTR.

    Ratios are medians of the rounds'; preparations take part in them without their start-up. The last column is the
    time of one core that a row takes beyond the start-up: other work on the machine changes it least.
    """
    rates = {each.name: np.array(each.found) for each in found}
    peers = {name: rate for name, rate in rates.items() if name.startswith("FuxiCTR")}
    fastest = max(peers.values(), key=lambda rate: float(np.median(rate)), default=None)
    starting = next(each.cpu_s for each in found if each.name == START)
    lines = [
        "| what | rows/s, median | least | most | without start-up | to FuxiCTR | us of a core a row |",
        "|---|---|---|---|---|---|---|",
    ]
    for each, rate in zip(found, rates.values(), strict=True):
        low, middle, high = (f"{value:,.0f}" for value in np.percentile(rate, [0, 50, 100]))
        net, ratio, cost = "", "", ""
        if each.starts > START_ROWS:
            without_start = (each.starts - START_ROWS) / (each.starts / rate - START_ROWS / rates[START])
            net = f"{np.median(without_start):,.0f}"
            ratio = "" if fastest is None else f"{np.median(without_start / fastest):.1f}"
            cost = f"{1e6 * np.median(np.subtract(each.cpu_s, starting)) / (each.starts - START_ROWS):.2f}"
        lines.append(f"| {each.name} | {middle} | {low} | {high} | {net} | {ratio} | {cost} |")
    return "\n".join(lines)


def main(
    rows: Annotated[int, typer.Option(min=1000, help="Rows to prepare.")] = 500_000,
    many_rows: Annotated[int, typer.Option(min=10_000, help="Rows to prepare besides, without the peers.")] = 5_000_000,
    loader_rows: Annotated[int, typer.Option(min=10_000, help="Rows to load and to stream.")] = 2_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all contestants take their turn.")] = 5,
    workers: Annotated[int, typer.Option(min=1, help="Processes of prepare.")] = 2,
    peer_python: Annotated[
        list[Path] | None, typer.Option(help="Python that has FuxiCTR; may be given for several versions.")
    ] = None,
    engines_python: Annotated[Path | None, typer.Option(help="Python that has polars, duckdb and pyarrow.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to make a temporary folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Measure the data's way and print a table."""
    with tempfile.TemporaryDirectory(prefix="data-speed-", dir=folder) as made:
        found = contestants(Path(made), rows, many_rows, loader_rows, workers, peer_python or [], engines_python)
        for turn in range(rounds):
            for each in found if turn % 2 == 0 else reversed(found):
                each.found.append(each.measure())
                print(f"round {turn + 1}: {each.name}: {each.found[-1]:,.0f} rows/s", file=sys.stderr)
    record = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "environment": environment.describe(),
        "cores": len(os.sched_getaffinity(0)),
        "rows": rows,
        "many_rows": many_rows,
        "loader_rows": loader_rows,
        "workers": workers,
        "load_average": os.getloadavg(),
        "cpu_s": {each.name: each.cpu_s for each in found if each.cpu_s},
        "rows_per_s": {each.name: each.found for each in found},
    }
    print(table(found))
    if out is not None:
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run(app)

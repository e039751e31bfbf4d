"""Peak memory of ``erase-rec prepare`` at several sizes of input, all its processes together.

    python benchmarks/prepare_memory.py --memory 2GiB --out prepare-memory.json

Writes made-up Criteo rows once, in ten files, to a temporary folder (245 bytes a row); a size is so many of them.
Memory is sampled from /proc every 50 ms: resident pages of the whole process tree, added up, so that pages shared by
processes count several times; and those that belong to no file (anonymous), which the system cannot take back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from erase_rec import environment
from erase_rec.cli.main import run
from erase_rec.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[1]
FILES = 10
SAMPLE_EVERY_S = 0.05
ENCODINGS = {
    "hash": (
        "features.sparse_defaults.encoding=hash",
        "features.sparse_defaults.num_embeddings=1000000",
        "features.sparse_defaults.min_count=null",
    ),
    "vocabulary 10": ("features.sparse_defaults.encoding=vocabulary", "features.sparse_defaults.min_count=10"),
}


@dataclass(frozen=True)
class Peak:
    """One preparation; memory in MiB."""

    encoding: str
    rows: int
    resident_mib: float
    anonymous_mib: float
    s: float
    folder_mib: float


def process_tree(root: int) -> list[int]:
    """``root`` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in parentheses may hold anything; the parent is the second field behind it.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree, found = [root], [root]
    while tree:
        tree = [child for parent in tree for child in children.get(parent, [])]
        found += tree
    return found


def memory_mib(pids: list[int]) -> tuple[float, float]:
    """Resident and anonymous memory of processes, those that are gone left out."""
    resident = anonymous = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        kib = {name: int(value) for name, value in re.findall(r"^(VmRSS|RssAnon|RssShmem):\s+(\d+) kB", status, re.M)}
        resident += kib.get("VmRSS", 0)
        anonymous += kib.get("RssAnon", 0) + kib.get("RssShmem", 0)
    return resident / 1024, anonymous / 1024


def watched(command: list[str]) -> tuple[float, float, float]:
    """Runs a command; peaks of resident and anonymous memory in MiB, and seconds.

    Raises:
        UserError: it fails; holds its output.
    """
    start_s, peaks = time.perf_counter(), (0.0, 0.0)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=errors)
        while process.poll() is None:
            now = memory_mib(process_tree(process.pid))
            peaks = (max(peaks[0], now[0]), max(peaks[1], now[1]))
            time.sleep(SAMPLE_EVERY_S)
        seconds = time.perf_counter() - start_s
        if process.returncode:
            errors.seek(0)
            raise UserError(f"{' '.join(command)} ended with code {process.returncode}:\n{errors.read()[-2000:]}")
    return (*peaks, seconds)


def prepare(files: list[Path], rows: int, encoding: str, memory: str, workers: int, folder: Path) -> Peak:
    """Prepares ``files`` and removes what was written."""
    listed = json.dumps([str(path) for path in files])
    resident, anonymous, seconds = watched(
        [
            *(sys.executable, "-m", "erase_rec", "prepare", "--config", "ctr_criteo.yaml", "--out", str(folder)),
            *("--memory", memory, "--workers", str(workers), f"data.train={listed}"),
            *ENCODINGS[encoding],
        ]
    )
    size_mib = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    shutil.rmtree(folder)
    return Peak(encoding, rows, resident, anonymous, seconds, size_mib)


def main(
    million_rows: Annotated[list[int] | None, typer.Option("--million-rows", help="Sizes; default: 2, 8, 20.")] = None,
    memory: Annotated[str, typer.Option(help="The bound given to prepare.")] = "2GiB",
    workers: Annotated[int, typer.Option(min=1, help="Processes of prepare.")] = 2,
    only: Annotated[str, typer.Option(help="Take only encodings whose name holds this.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Where to make a temporary folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Measure peak memory at each size and print a table."""
    sizes = sorted(million_rows or [2, 8, 20])
    found: list[Peak] = []
    with tempfile.TemporaryDirectory(prefix="prepare-memory-", dir=folder) as made:
        text = Path(made) / "text"
        watched(
            [
                *(sys.executable, "-m", "erase_rec", "synth", "--rows", str(sizes[-1] * 10**6), "--eval-rows", "0"),
                *("--files", str(FILES), "--out", str(text)),
            ]
        )
        summary = json.loads((text / "synth.json").read_text())["files"]
        for encoding in (name for name in ENCODINGS if only in name):
            for size in sizes:
                chosen = summary[: max(1, round(FILES * size / sizes[-1]))]
                rows = sum(file["rows"] for file in chosen)
                paths = [text / file["name"] for file in chosen]
                found.append(prepare(paths, rows, encoding, memory, workers, Path(made) / "prepared"))
                print(f"{encoding}, {rows:,} rows: {found[-1].resident_mib:,.0f} MiB", file=sys.stderr)
    print("| encoding | rows | peak resident MiB | peak anonymous MiB | s | rows/s | prepared MiB |")
    print("|---|---|---|---|---|---|---|")
    for peak in found:
        print(
            f"| {peak.encoding} | {peak.rows:,} | {peak.resident_mib:,.0f} | {peak.anonymous_mib:,.0f} "
            f"| {peak.s:,.1f} | {peak.rows / peak.s:,.0f} | {peak.folder_mib:,.0f} |"
        )
    if out is not None:
        record = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "environment": environment.describe(),
            "cores": len(os.sched_getaffinity(0)),
            "memory": memory,
            "workers": workers,
            "peaks": [asdict(peak) for peak in found],
        }
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run(app)

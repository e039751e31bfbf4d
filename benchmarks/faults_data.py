"""Kills ``prepare`` and ``train`` with SIGKILL at random moments, lets them go on, and audits every row by its id.

    python benchmarks/faults_data.py --out faults-data.json

The rows are made up, with a column ``row_id`` that names each; a feature of it with a vocabulary of all ids carries it
through. A preparation is killed (the main process alone, a worker alone, or all processes) and run again until it comes
to its end; then its parts must hold every id once and equal, byte for byte, those of a preparation that nobody
disturbed. A training run is killed and resumed likewise, with rows from memory, streamed and prepared in turn; a record
of what each step trained on (recorded_train.py) must show every id once an epoch, and the result must equal that of an
undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prepare_memory import process_tree

from data.features.encoding import FIRST_ROW, IntArray
from data.features.fitted import Features
from erase_rec import environment
from erase_rec.cli.main import run
from erase_rec.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[1]
ID = "row_id"
COLUMNS = (
    "data.kind=csv",
    "data.label.column=label",
    f"features.sparse=[{{name: {ID}, min_count: 1}}, C1, C2, C5, C6, C9, C14]",
    "features.dense=[I1, I2, I3]",
)
RUN = (
    "towers=[{name: deep, kind: mlp, loss: {kind: bce}, params: {hidden: [16], out_dim: 8}}]",
    "embedding={dim: 4, backend: torch}",
    "train={epochs: 3, local_batch_size: 512, checkpoint_every_steps: 5, threads: 1, device: cpu}",
    "data.shuffle_window=8192",
    "data.workers=1",
)
READING = ("memory", "stream", "prepared")
VICTIMS = ("main process", "worker", "all processes")
PATIENCE_S = 300.0
ORPHANS_END_S = 20.0


@dataclass
class Tally:
    """What was done and found.

    Attributes:
        kills: kills that met a running process, by victim.
        runs: commands that came to their end and were audited.
        faults: what is wrong, a line each; empty: nothing.
    """

    kills: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    faults: list[str] = field(default_factory=list)


def start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Starts a command as the leader of a process group; what it prints goes to ``log`` in ``folder``."""
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log, start_new_session=True)


def finish(command: list[str], folder: Path) -> float:
    """Runs a command to its end; seconds.

    Raises:
        UserError: it fails or hangs; names the log.
    """
    start_s = time.perf_counter()
    process = start(command, folder)
    try:
        code = process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise UserError(f"{' '.join(command)} hangs; see {folder / 'log'}") from None
    if code:
        raise UserError(f"{' '.join(command)} ended with code {code}; see {folder / 'log'}")
    return time.perf_counter() - start_s


def kill(command: list[str], folder: Path, after_s: float, victim: str, tally: Tally) -> bool:
    """Starts a command and kills ``victim`` after a while; whether there was anything left to kill."""
    process = start(command, folder)
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        tree = process_tree(process.pid)
        targets = {"main process": tree[:1], "worker": tree[1:][-1:], "all processes": tree}[victim]
        for pid in targets:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            tally.faults.append(f"{' '.join(command)}: hangs after a kill of its {victim}; see {folder / 'log'}")
            return True
        if victim == "worker" and targets and code not in (0, 2):
            tally.faults.append(f"{' '.join(command)}: ends with code {code}, not 2, when a worker is killed")
        if not orphans_end(tree):
            tally.faults.append(f"{' '.join(command)}: processes live on after a kill of its {victim}")
        if targets:
            tally.kills[victim] = tally.kills.get(victim, 0) + 1
        return bool(targets)
    return False


def orphans_end(pids: list[int]) -> bool:
    """Whether all processes end soon."""
    give_up_s = time.perf_counter() + ORPHANS_END_S
    while time.perf_counter() < give_up_s:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def audit_prepared(folder: Path, whole: Path, rows: int) -> list[str]:
    """What is wrong with a prepared folder: lost or doubled ids, or parts that differ from those of ``whole``."""
    manifest = json.loads((folder / "manifest.json").read_text())
    expected = json.loads((whole / "manifest.json").read_text())
    faults = []
    features = Features.load(folder / "features")
    texts = features.encodings[0].categories.to_pylist()  # type: ignore[attr-defined]
    found: list[str] = []
    for part in manifest["splits"]["train"]["parts"]:
        table = pa.ipc.open_file(pa.memory_map(str(folder / part["file"]["name"]))).read_all()
        found += [texts[row - FIRST_ROW] for row in table[f"sparse/{ID}"].to_pylist()]
    if sorted(found) != [f"t{number:012d}" for number in range(rows)]:
        faults.append(f"{folder}: {len(found)} training rows, {len(set(found))} different ids, expected {rows}")
    for split, record in expected["splits"].items():
        digests = [part["file"]["sha256"] for part in record["parts"]]
        if [part["file"]["sha256"] for part in manifest["splits"][split]["parts"]] != digests:
            faults.append(f"{folder}: {split} parts differ from those of an undisturbed preparation")
    if manifest["fingerprint"] != expected["fingerprint"]:
        faults.append(f"{folder}: another fingerprint than an undisturbed preparation")
    return faults


def prepare_faults(folder: Path, rows: int, kills: int, rng: random.Random) -> Tally:
    """Kills preparations."""
    source = folder / "prepare-input"
    synth(source, rows)

    def command(out: Path) -> list[str]:
        paths = (f"data.train={source}/train-*.csv", f"data.eval={source}/eval.csv", f"data.row_id={ID}")
        options = ("--config", "ctr_criteo.yaml", "--out", str(out), "--workers", "2")
        return [sys.executable, "-m", "erase_rec", "prepare", *options, *COLUMNS, *paths]

    tally, whole = Tally(), folder / "whole"
    seconds = finish(command(whole), folder)
    while sum(tally.kills.values()) < kills:
        out = folder / f"prepared-{tally.runs}"
        for _ in range(rng.randint(1, 3)):
            kill(command(out), folder, rng.uniform(0, seconds), rng.choice(VICTIMS), tally)
        finish(command(out), folder)
        tally.runs += 1
        tally.faults += audit_prepared(out, whole, rows)
        shutil.rmtree(out)
        print(f"prepare: {tally}", file=sys.stderr)
    return tally


def recorded_steps(path: Path) -> dict[int, np.ndarray[Any, np.dtype[np.int64]]]:
    """What each step of a process trained on."""
    numbers, found, at = np.fromfile(path, dtype=np.int64), {}, 0
    while at < len(numbers):
        step, size = numbers[at : at + 2].tolist()
        found[step] = numbers[at + 2 : at + 2 + size]
        at += 2 + size
    return found


def lost_rows(steps: dict[int, IntArray], *, epochs: int, rows: int, first_row: int) -> list[str]:
    """What is wrong, a sentence each; empty: every epoch had each row once.

    Args:
        steps: row ids of each step, from 0 on without a gap.
        epochs: that were trained.
        rows: of an epoch, with ids from ``first_row`` on.
        first_row: the lowest id.
    """
    ids = np.concatenate([steps[step] for step in range(len(steps))])
    if len(ids) != epochs * rows:
        return [f"trained on {len(ids)} rows, expected {epochs} times {rows}"]
    every = np.arange(first_row, first_row + rows)
    return [
        f"epoch {epoch + 1} lost {rows - len(np.unique(part))} rows"
        for epoch, part in enumerate(ids.reshape(epochs, rows))
        if not np.array_equal(np.sort(part), every)
    ]


def audit_training(records: list[Path], rows: int, epochs: int) -> list[str]:
    """What is wrong with a run of several processes: steps without a record, or ids not once an epoch.

    A process that goes on at step s makes void what those before it did from s on: it started from a checkpoint.
    """
    steps: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
    for path in records:
        found = recorded_steps(path) if path.exists() else {}
        if found:
            steps = {step: ids for step, ids in steps.items() if step < min(found)} | found
    if sorted(steps) != list(range(len(steps))):
        return [f"{records[-1]}: steps are missing; there are {len(steps)}, the last is {max(steps)}"]
    wrong = lost_rows(steps, epochs=epochs, rows=rows, first_row=FIRST_ROW)
    return [f"{records[-1]}: {sentence}" for sentence in wrong]


def train_faults(folder: Path, rows: int, kills: int, rng: random.Random) -> Tally:
    """Kills training runs; every way of reading takes its turn."""
    source = folder / "train-input"
    synth(source, rows)
    files = (f"data.train={source}/train-*.csv", f"data.eval={source}/eval.csv")
    prepared = folder / "train-prepared"
    options = ("--config", "ctr_criteo.yaml", "--out", str(prepared))
    finish([sys.executable, "-m", "erase_rec", "prepare", *options, *COLUMNS, *files], folder)
    tally, expected = Tally(), {}

    def command(name: str, reading: str, record: Path) -> list[str]:
        program = [sys.executable, str(CHECKOUT / "benchmarks" / "recorded_train.py"), str(record), ID]
        if (folder / "runs" / name / "config.yaml").exists():
            return [*program, "--resume", str(folder / "runs" / name)]
        chosen = f"data.prepared={prepared}" if reading == "prepared" else f"data.reading={reading}"
        where = (f"run.dir={folder / 'runs'}", f"run.name={name}")
        return [*program, "--config", "ctr_criteo.yaml", *COLUMNS, *RUN, *files, chosen, *where]

    for reading in READING:
        name = f"whole-{reading}"
        seconds = finish(command(name, reading, folder / f"{name}.record"), folder)
        expected[reading] = (seconds, result(folder / "runs" / name))
    if len({json.dumps(found) for _, found in expected.values()}) != 1:
        tally.faults.append("runs from memory, streamed and prepared rows have different results")
    while sum(tally.kills.values()) < kills:
        reading = READING[tally.runs % len(READING)]
        seconds, whole = expected[reading]
        name, records = f"killed-{tally.runs}", []
        for attempt in range(rng.randint(1, 3)):
            records.append(folder / f"{name}-{attempt}.record")
            kill(command(name, reading, records[-1]), folder, rng.uniform(0, seconds), "all processes", tally)
        records.append(folder / f"{name}-last.record")
        finish(command(name, reading, records[-1]), folder)
        tally.runs += 1
        tally.faults += audit_training(records, rows, epochs=3)
        if result(folder / "runs" / name) != whole:
            tally.faults.append(f"{name}: another result than an undisturbed run ({reading})")
        print(f"train ({reading}): {tally}", file=sys.stderr)
    return tally


def synth(out: Path, rows: int) -> None:
    """Made-up rows with ids, in three files where there are enough."""
    files = str(min(3, -(-rows // 65536)))
    options = ("--rows", str(rows), "--eval-rows", "2000", "--format", "csv", "--id-column", "--files", files)
    finish([sys.executable, "-m", "erase_rec", "synth", *options, "--out", str(out)], out.parent)


def result(run_folder: Path) -> dict[str, Any]:
    """The summary without its clock."""
    summary: dict[str, Any] = json.loads((run_folder / "summary.json").read_text())
    return {key: value for key, value in summary.items() if key != "throughput"}


def main(
    prepare_kills: Annotated[int, typer.Option(min=0, help="Kills of prepare; 0 leaves it out.")] = 20,
    train_kills: Annotated[int, typer.Option(min=0, help="Kills of train; 0 leaves it out.")] = 20,
    prepare_rows: Annotated[int, typer.Option(min=1000, help="Rows to prepare.")] = 400_000,
    train_rows: Annotated[int, typer.Option(min=1000, help="Rows to train on.")] = 30_000,
    seed: Annotated[int, typer.Option(help="Of the moments and victims.")] = 1,
    folder: Annotated[
        Path | None, typer.Option(help="Where to make a folder; it stays where a fault is found.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Kill, go on, audit; code 2 where a row is lost or doubled, or anything else is wrong."""
    made = Path(tempfile.mkdtemp(prefix="faults-data-", dir=folder))
    rng = random.Random(seed)
    found: dict[str, Tally] = {}
    if prepare_kills:
        found["prepare"] = prepare_faults(made, prepare_rows, prepare_kills, rng)
    if train_kills:
        found["train"] = train_faults(made, train_rows, train_kills, rng)
    print("| command | kills | killed | runs to the end | faults |")
    print("|---|---|---|---|---|")
    for name, tally in found.items():
        victims = ", ".join(f"{victim} {count}" for victim, count in sorted(tally.kills.items()))
        print(f"| {name} | {sum(tally.kills.values())} | {victims} | {tally.runs} | {len(tally.faults)} |")
    if out is not None:
        record = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "environment": environment.describe(),
            "seed": seed,
            "rows": {"prepare": prepare_rows, "train": train_rows},
            "found": {name: asdict(tally) for name, tally in found.items()},
        }
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    faults = [fault for tally in found.values() for fault in tally.faults]
    if faults:
        raise UserError("\n".join([f"{len(faults)} faults, see {made}:", *faults]))
    shutil.rmtree(made)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run(app)

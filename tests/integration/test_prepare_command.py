"""``erase-rec prepare`` and ``inspect`` as a user calls them, and as signals, limits and dead workers end them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import in_process
import numpy as np
import pyarrow as pa
import pytest

from data.sources import text_file

ROWS = 20_000
# Chunks of 6 KiB: the file has as many groups as one of a thousand times its size.
SMALL_CHUNKS = (
    "from data.sources import text_file as t; t.CHUNK_BYTES, t.READ_BYTES = 6 << 10, 1 << 10; "
    "from erase_rec.cli.main import main; main()"
)
CONFIG = """\
data: {kind: csv, train: log.csv, eval_fraction: 0.2, label: {column: label}}
features:
  dense: [{name: x, transform: standardize}]
  sparse: [{name: c, encoding: vocabulary, min_count: 2}, {name: h, column: c, num_embeddings: 1000}]
towers: [{name: only, kind: mlp, loss: {kind: bce}}]
train: {epochs: 1, local_batch_size: 500, threads: 1}
embedding: {backend: torch}
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare")
    rng = np.random.default_rng(0)
    columns = (rng.integers(0, 2, ROWS), rng.normal(size=ROWS).round(4), rng.zipf(1.3, ROWS) % 5000)
    lines = [f"{label},{x},c{c}" for label, x, c in zip(*(column.tolist() for column in columns), strict=True)]
    (folder / "log.csv").write_text("label,x,c\n" + "\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", SMALL_CHUNKS, *arguments]


def prepare_arguments(out: str, *more: str) -> list[str]:
    return command("prepare", "--config", "config.yaml", "--out", out, "--workers", "2", *more)


def call(cwd: Path, arguments: Sequence[str], expect: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=240, check=False, **options)
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        if path.name == "manifest.json":
            content = json.dumps(json.loads(content) | {"made": None, "sha256": None}).encode()
        found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def assert_each_row_once(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    numbers: list[int] = []
    for split in manifest["splits"].values():
        for part in split["parts"]:
            reader = pa.ipc.open_file(str(folder / part["file"]["name"]))
            for block, first in enumerate(part["blocks"]["firsts"]):
                numbers += (reader.get_batch(block).column("number").to_numpy().astype(np.int64) + first).tolist()
    assert sorted(numbers) == list(range(2, ROWS + 2))


def assert_estimate(shown: str) -> None:
    found = re.search(r"about ([\d,]+) rows", shown)
    assert found is not None
    assert int(found[1].replace(",", "")) == pytest.approx(ROWS, rel=0.1)


@pytest.fixture(scope="module")
def whole(workplace: Path) -> dict[str, str]:
    """What an uninterrupted preparation leaves."""
    shown = call(workplace, prepare_arguments("whole")).stdout
    assert_estimate(shown)
    assert "read 100 %  20,000 rows" in shown
    assert "encode 100 %" in shown
    assert "train on it with data.prepared=whole" in shown
    assert_each_row_once(workplace / "whole")
    return digests(workplace / "whole")


def test_killed_at_random_moments_nothing_is_lost_or_doubled(workplace: Path, whole: dict[str, str]) -> None:
    draw = random.Random(5)
    for _ in range(4):
        process = subprocess.Popen(prepare_arguments("killed"), cwd=workplace, stdout=subprocess.DEVNULL)
        wait_for_groups(workplace / "killed", process, draw.randrange(0, 20))
        process.kill()
        process.wait()
    call(workplace, prepare_arguments("killed"))
    assert digests(workplace / "killed") == whole
    assert_each_row_once(workplace / "killed")


def wait_for_groups(folder: Path, process: subprocess.Popen[bytes], count: int) -> None:
    """Until so many more groups are finished, or all is."""
    before = len(list(folder.glob(".work/*.json")))
    deadline = time.monotonic() + 120
    while process.poll() is None and len(list(folder.glob(".work/*.json"))) < before + count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ctrl_c_says_how_to_go_on(workplace: Path, whole: dict[str, str]) -> None:
    """The terminal interrupts all processes of the command."""
    process = subprocess.Popen(
        prepare_arguments("interrupted"), cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    wait_for_groups(workplace / "interrupted", process, 3)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    expected = "interrupted; what is finished is kept: run the same command again to go on\n"
    assert errors.decode() == expected
    call(workplace, prepare_arguments("interrupted"))
    assert digests(workplace / "interrupted") == whole


def test_a_killed_worker_is_one_message(workplace: Path, whole: dict[str, str]) -> None:
    process = subprocess.Popen(
        prepare_arguments("bereft"), cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for_groups(workplace / "bereft", process, 2)
    os.kill(worker_of(process.pid), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.decode().startswith("error: a worker process was ended by signal 9")
    assert errors.count(b"\n") == 1
    call(workplace, prepare_arguments("bereft"))
    assert digests(workplace / "bereft") == whole


def worker_of(parent: int) -> int:
    """Of the nursery, the one child of the command."""
    (nursery,) = children_of(parent)
    return children_of(nursery)[0]


def children_of(parent: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_a_file_system_that_takes_no_more_is_one_message(workplace: Path, whole: dict[str, str]) -> None:
    """As a full disk does, but without one."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = call(workplace, prepare_arguments("full"), 2, preexec_fn=limit)
    assert done.stderr.startswith("error: full: cannot be written: File too large; make room and run the same command")
    assert done.stderr.count("\n") == 1
    call(workplace, prepare_arguments("full"))
    assert digests(workplace / "full") == whole


def test_two_at_once_are_refused(workplace: Path, whole: dict[str, str]) -> None:
    """The first is held still, so that it cannot be ready before the second looks."""
    with subprocess.Popen(prepare_arguments("busy"), cwd=workplace, stdout=subprocess.DEVNULL) as process:
        wait_for_groups(workplace / "busy", process, 1)
        process.send_signal(signal.SIGSTOP)
        try:
            done = call(workplace, prepare_arguments("busy"), 2)
        finally:
            process.send_signal(signal.SIGCONT)
        assert f"busy: process {process.pid} is preparing data in this folder" in done.stderr
        assert process.wait(timeout=120) == 0
    assert digests(workplace / "busy") == whole


def test_mistakes_end_with_one_message(workplace: Path) -> None:
    for more, words in [
        (["--memory", "lots"], "--memory: expected a size"),
        (["--memory", "99MiB"], "are too little for these rows and features; give --memory"),
        (["data.train=gone.csv"], "file 'gone.csv' not found"),
        (["data.split.by=time"], "data.split.column"),
        (["towers.only.kind=mpl"], "did you mean 'mlp'?"),
    ]:
        arguments = ("prepare", "--config", "config.yaml", "--out", "mistake", "--workers", "2", *more)
        done = in_process.call(workplace, *arguments, expect=2)
        assert words in done.stderr
        assert done.stderr.startswith("error: ")
    assert not (workplace / "mistake" / "manifest.json").exists()


def test_a_dry_run_leaves_no_folder(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "CHUNK_BYTES", 6 << 10)
    monkeypatch.setattr(text_file, "READ_BYTES", 1 << 10)
    shown = in_process.call(workplace, "prepare", "--config", "config.yaml", "--out", "dry", "--dry-run").stdout
    assert_estimate(shown)
    assert not (workplace / "dry").exists()


def test_training_on_prepared_rows_is_training_on_the_files(workplace: Path, whole: dict[str, str]) -> None:
    """Chunks as ever: what a user types."""
    in_process.call(workplace, "prepare", "--config", "config.yaml", "--out", "ready")
    results = []
    for name, data in (("files", []), ("ready", ["data.prepared=ready", "data.train=[]"])):
        in_process.call(workplace, "train", "--config", "config.yaml", f"run.name={name}", *data)
        summary = json.loads((workplace / "runs" / name / "summary.json").read_text())
        results.append((summary["eval"], summary["train"], summary["data"]["fingerprint"]))
    assert results[0] == results[1]
    refused = ("data.prepared=ready", "data.eval_fraction=0.3")
    done = in_process.call(workplace, "train", "--config", "config.yaml", *refused, expect=2)
    assert "error: data.eval_fraction: 0.3 here, but " in done.stderr
    assert "ready was prepared with 0.2; take that setting" in done.stderr


def test_inspect_shows_and_verifies(workplace: Path, whole: dict[str, str]) -> None:
    shown = in_process.call(workplace, "inspect", "whole", "--verify", "--dim", "8", "--html", "page.html").stdout
    for words in ("label rate over rows in file order", "unseen in eval", "every file is as it was written"):
        assert words in shown
    assert (workplace / "page.html").read_text().startswith("<!doctype html>")
    found = json.loads(in_process.call(workplace, "inspect", "whole", "--json").stdout)
    assert sum(split["rows"] for split in found["splits"].values()) == ROWS
    call(workplace, ["cp", "-r", "whole", "damaged"])
    part = workplace / "damaged" / "train" / "part-00001.arrow"
    part.write_bytes(part.read_bytes().replace(b"\0" * 8, b"\0" * 7 + b"\1", 1))
    done = in_process.call(workplace, "inspect", "damaged", "--verify", expect=2)
    assert "error: damaged: damaged or missing: train/part-00001.arrow" in done.stderr


def test_neither_the_command_nor_its_workers_load_torch(workplace: Path) -> None:
    script = (
        "import sys\nfrom erase_rec.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print('torch:', 'torch' in sys.modules)\n"
    )
    arguments = ["prepare", "--config", "config.yaml", "--out", "light", "--dry-run"]
    shown = call(workplace, [sys.executable, "-c", script, *arguments]).stdout
    assert "torch: False" in shown

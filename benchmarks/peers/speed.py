"""Training rows a second on a CPU: this project and its peers in turns, on the same made-up Criteo rows.

    python benchmarks/peers/speed.py --out docs/results/peers-speed.json --python fuxictr=PYTHON --python deepctr=PYTHON

All have embeddings of 16, batches of 1024 rows, two threads and the same two cores (``--cpus``), and only one of them
runs at a time: each round gives every arm one turn, forwards and backwards by turns. A turn is one call of the peer's
own training on ``--turn-rows`` rows that are in memory, after it has trained on 20,000 others; of this project it is a
run of as many rows from a prepared folder, without its first steps. What counts is the ratio within a round. Peak
memory is of the whole process; each arm has its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OWN = ("dlrm.yaml", "dcn.yaml")
PEERS = {
    "fuxictr": ("DLRM", "DLRM, its own loader", "DCNv2"),
    "deepctr": ("DeepFM", "DCNMix"),
    "torchrec": ("DLRM", "DLRM_DCN"),
}
ERASE = ("schedule.preset=erase", "over_arch.logits=additive")
WARM_STEPS = 20


@dataclass
class Arm:
    """One contestant in a process of its own.

    Attributes:
        name: for people.
        command: that starts its worker.
        task: of each turn.
        rows_per_s: one a turn.
        peak_mib: of its process so far.
    """

    name: str
    command: list[str]
    task: dict[str, Any]
    rows_per_s: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    process: subprocess.Popen[str] | None = None

    def turn(self, environment: dict[str, str]) -> float:
        """Trains once.

        Raises:
            SystemExit: its worker has ended.
        """
        if self.process is None:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(self.task) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: its worker ended with {self.process.wait()}")
        answer = json.loads(line)
        self.peak_mib = answer["peak_mib"]
        return float(answer["rows_per_s"])


def written(work: Path, rows: int) -> None:
    """Makes up rows, prepares them for this project and encodes them for the peers; what is there is kept."""
    files = [f"data.train={work / 'raw/train-00000.parquet'}", f"data.eval={work / 'raw/eval.parquet'}"]
    own = [sys.executable, "-m", "erase_rec"]
    if not (work / "raw/synth.json").exists():
        synth = ["synth", "--rows", str(rows), "--eval-rows", "20000", "--format", "parquet"]
        subprocess.run([*own, *synth, "--out", str(work / "raw")], cwd=ROOT, check=True)
    if not (work / "prepared").exists():
        config = str(HERE / "dlrm.yaml")
        subprocess.run([*own, "prepare", "--config", config, "--out", str(work / "prepared"), *files], check=True)
    if not (work / "rows/fields.json").exists():
        overrides = [part for each in files for part in ("--set", each)]
        encode = [sys.executable, str(HERE / "encode.py"), f"rows={HERE / 'dlrm.yaml'}", "--out", str(work)]
        subprocess.run([*encode, *overrides], check=True)


def arms_of(work: Path, pythons: dict[str, str], turn_rows: int, towers: dict[str, Sequence[str]]) -> list[Arm]:
    """Every contestant; this project's first configuration comes first, as ratios are to it."""
    arms = []
    steps = turn_rows // 1024 + WARM_STEPS
    for config in OWN:
        losses = [f"towers.{tower}.loss={{kind: bce, target: joint}}" for tower in towers[config]]
        for preset, overrides in (("exact", []), ("erase", [*ERASE, *losses])):
            shared = [f"data.prepared={work / 'prepared'}", f"train.steps={steps}", "train.epochs=null"]
            task = {"config": str(HERE / config), "overrides": [*shared, *overrides]}
            name = f"erase-rec {config.removesuffix('.yaml')} {preset}"
            arms.append(Arm(name, [sys.executable, str(HERE / "own_worker.py")], task))
    for peer, models in PEERS.items():
        for model in models:
            command = [pythons.get(peer, sys.executable), str(HERE / "worker.py"), peer, "--threads", "2"]
            arms.append(
                Arm(f"{peer} {model}", command, {"folder": str(work / "rows"), "model": model, "time": turn_rows})
            )
    return arms


def results(arms: Sequence[Arm], fields: dict[str, Any], rows: int) -> dict[str, Any]:
    """Medians over turns, and of each round the ratio to the first arm."""
    measured = [
        {
            "arm": arm.name,
            "rows_per_s": round(statistics.median(arm.rows_per_s)),
            "turns": [round(speed) for speed in arm.rows_per_s],
            "first_arm_over_this": [
                round(first / speed, 2) for first, speed in zip(arms[0].rows_per_s, arm.rows_per_s, strict=True)
            ],
            "peak_mib": round(arm.peak_mib),
        }
        for arm in arms
    ]
    tables = sum(fields["tables"].values())
    machine = {"processor": platform.processor() or platform.machine(), "cpus": sorted(os.sched_getaffinity(0))}
    return {"rows": rows, "table_rows": tables, "machine": machine, "arms": measured}


def main() -> None:
    """Writes rows once, then measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/peers/speed"))
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--turn-rows", type=int, default=102_400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpus", default="0,1", help="the two cores that everything runs on")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PYTHON")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    written(work, arguments.rows)
    os.sched_setaffinity(0, {int(cpu) for cpu in arguments.cpus.split(",")})
    environment = os.environ | {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    towers = {"dlrm.yaml": ("interaction",), "dcn.yaml": ("cross", "deep")}
    pythons = dict(each.split("=", 1) for each in arguments.python)
    arms = arms_of(work, pythons, arguments.turn_rows, towers)
    fields = json.loads((work / "rows/fields.json").read_text(encoding="utf-8"))
    for number in range(arguments.rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            arm.rows_per_s.append(arm.turn(environment))
            print(f"round {number + 1}: {arm.name}: {arm.rows_per_s[-1]:,.0f} rows/s", flush=True)
        text = json.dumps(results(arms, fields, arguments.rows), indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Local objectives against the strongest exact arm, on test rows that no choice has seen.

    erase-rec sweep --config sweeps/objectives_frappe.yaml --jobs 2
    python benchmarks/objectives.py frappe --jobs 2 --out docs/results/ne-gap      # about half as long again

For each set: takes from the sweep on the validation rows the learning rates and the number of steps with which each arm
was best there, trains each arm anew with several seeds (a sweep of its own, which goes on where it was stopped), scores
the test rows, and compares every arm with the exact arm that was best on the validation rows. Writes ``OUT.json``, a
list of rows, in which rows of the same set are replaced, and ``OUT.md``, its tables.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from erase_rec.summary import Summary
from erase_rec.sweep.record import PointRecord, SweepRecord
from eval.comparison import ScoredRun, compare, summarize

ROOT = Path(__file__).resolve().parents[1]
ASIDE = ("seed=", "run.", "train.epochs", "train.early_stopping", "train.threads")
"""Overrides of a point that the runs on the test rows do not take over."""


@dataclass(frozen=True)
class Chosen:
    """An arm with what was best for it on the validation rows.

    Attributes:
        arm: its name.
        ne: the best validation NE.
        step: after which step it was there.
        overrides: that the base is changed by.
    """

    arm: str
    ne: float
    step: int
    overrides: dict[str, Any]


def choose(sweep: Path) -> list[Chosen]:
    """The best point of each arm, in the order of the sweep; of equal ones the first.

    Raises:
        SystemExit: the sweep has not ended.
    """
    record = SweepRecord.read(sweep)
    if record is None or any(point.status != "finished" for point in record.points):
        raise SystemExit(f"{sweep}: the sweep has not ended; run: erase-rec sweep --config sweeps/{sweep.name}.yaml")
    best: dict[str, Chosen] = {}
    for point in record.points:
        found = best_of(sweep, point)
        if found.arm not in best or found.ne < best[found.arm].ne:
            best[found.arm] = found
    return list(best.values())


def best_of(sweep: Path, point: PointRecord) -> Chosen:
    """What a run was at its best evaluation."""
    checkpoints = sweep / point.folder / "checkpoints"
    newest = (checkpoints / "last").read_text(encoding="utf-8").strip()
    state = json.loads((checkpoints / newest / "state.json").read_text(encoding="utf-8"))["state"]
    step = int((checkpoints / "best").read_text(encoding="utf-8").strip().rpartition("_")[2])
    kept = [override for override in point.overrides if not override.startswith(ASIDE)]
    overrides = {key: yaml.safe_load(value) for key, _, value in (override.partition("=") for override in kept)}
    return Chosen(point.arm.partition(" ")[0], float(state["best"]["best"]), step, overrides)


def final_sweep(name: str, chosen: Sequence[Chosen], seeds: int) -> dict[str, Any]:
    """The sweep on the test rows, as it is written."""
    arms = {
        each.arm: each.overrides | {"train.steps": each.step, "train.eval_every_steps": each.step} for each in chosen
    }
    return {
        "base": str(ROOT / f"configs/objectives/{name}.yaml"),
        "overrides": {
            "data.eval": f"datasets/objectives/{name}/test.parquet",
            "eval.scores": True,
            "train.threads": 1,
            "train.early_stopping": None,
        },
        "arms": arms,
        "seeds": list(range(1, seeds + 1)),
    }


def run_final(name: str, chosen: Sequence[Chosen], folder: Path, seeds: int, jobs: int) -> None:
    """Trains each arm anew and scores the test rows."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump(final_sweep(name, chosen, seeds), sort_keys=False), encoding="utf-8")
    arguments = ["sweep", "--config", str(file), "--out", str(folder), "--jobs", str(jobs)]
    subprocess.run([sys.executable, "-m", "erase_rec", *arguments], cwd=ROOT, check=True)


def scored(run: Path) -> ScoredRun:
    """The test rows of a run."""
    table = pq.read_table(run / "scores.parquet").sort_by("row_id")
    columns = {name: torch.from_numpy(table[name].to_numpy().copy()) for name in ("row_id", "label", "logit")}
    return ScoredRun(columns["row_id"], columns["label"].double(), columns["logit"].double(), {})


def measure(name: str, chosen: Sequence[Chosen], folder: Path) -> list[dict[str, Any]]:
    """A row of results for each arm."""
    record = SweepRecord.read(folder)
    assert record is not None
    runs: dict[str, dict[int, ScoredRun]] = {}
    speeds: dict[str, list[float]] = {}
    for point in record.points:
        run = folder / point.folder
        runs.setdefault(point.arm, {})[point.seed] = scored(run)
        speeds.setdefault(point.arm, []).append(Summary.read(run).throughput.qps_mean)
    reference = min((each for each in chosen if each.arm.startswith("exact")), key=lambda each: each.ne).arm
    rows = []
    for each in chosen:
        arm, gap = summarize(list(runs[each.arm].values())), compare(runs[each.arm], runs[reference])
        rows.append(
            {
                "dataset": name,
                "arm": each.arm,
                "reference": reference,
                "seeds": len(gap.seeds),
                "rows": gap.rows,
                "ne": arm.ne.mid,
                "gap_pct": gap.total.mid,
                "ci_low_pct": gap.total.low,
                "ci_high_pct": gap.total.high,
                "seeds_ci_low_pct": gap.over_seeds.low,
                "seeds_ci_high_pct": gap.over_seeds.high,
                "auc": arm.auc,
                "rows_per_s": sum(speeds[each.arm]) / len(speeds[each.arm]),
                "validation_ne": each.ne,
                "steps": each.step,
                "lr": [each.overrides[f"optimizer.{part}.lr"] for part in ("dense", "sparse")],
            }
        )
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table a set; gaps in per cent with 95 % intervals over seeds and rows together."""
    parts = []
    for name in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == name]
        parts += [f"## {name}", ""]
        parts += [f"{own[0]['seeds']} seeds, {own[0]['rows']:,} test rows, against `{own[0]['reference']}`.", ""]
        header = ("arm", "NE", "gap %", "95 %", "over seeds alone", "AUC", "validation NE", "rates")
        parts += [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        for row in sorted(own, key=lambda row: float(row["ne"])):
            total, seeds = (
                f"{row[f'{kind}ci_low_pct']:+.3f} .. {row[f'{kind}ci_high_pct']:+.3f}" for kind in ("", "seeds_")
            )
            ne, gap, auc, validation = (
                f"{row['ne']:.5f}",
                f"{row['gap_pct']:+.3f}",
                f"{row['auc']:.5f}",
                row["validation_ne"],
            )
            cells = (row["arm"], ne, gap, total, seeds, auc, f"{validation:.5f}", ", ".join(map(str, row["lr"])))
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Measures the named sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", help="frappe, movielens, adult, sparrow, criteo")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the sweeps' folders are")
    parser.add_argument("--seeds", type=int, default=5, help="2 or more: one seed has no interval")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds: an interval needs 2 or more")
    json_path, page = arguments.out.with_suffix(".json"), arguments.out.with_suffix(".md")
    rows = json.loads(json_path.read_text(encoding="utf-8")) if json_path.exists() else []
    for name in arguments.sets:
        chosen = choose(arguments.runs / f"objectives_{name}")
        folder = arguments.runs.resolve() / f"objectives_{name}_test"
        run_final(name, chosen, folder, arguments.seeds, arguments.jobs)
        rows = [row for row in rows if row["dataset"] != name] + measure(name, chosen, folder)
        json_path.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        page.write_text(markdown(rows), encoding="utf-8")
        print(markdown([row for row in rows if row["dataset"] == name]))


if __name__ == "__main__":
    main()

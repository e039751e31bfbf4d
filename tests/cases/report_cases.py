"""Run folders with planted results, and sweeps of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from erase_rec.dashboards import PEAK_MEMORY
from erase_rec.run_log import FileRunLog
from erase_rec.schedule.measured_streams import Interval
from erase_rec.schedule.program import Op
from erase_rec.step_timeline import StepTimeline
from erase_rec.summary import (
    DataSummary,
    EvalSummary,
    Status,
    Summary,
    ThroughputSummary,
    TowerSummary,
    TrainSummary,
)

GLOBAL_BATCH = 100
STEP = StepTimeline(
    step=3,
    rows=GLOBAL_BATCH,
    intervals=(
        Interval(Op("forward", "tower:a", "a"), "MainThread", 0.0, 1.0, 0.0, 0.5),
        Interval(Op("early_backward", "tower:a", "a", ("forward:a",), worker=1), "worker", 1.0, 3.0, 0.5, 1.0),
    ),
    critical_path=("forward:a", "early_backward:a"),
)
"""A measured step."""


@dataclass(frozen=True)
class Planted:
    """What a run shall have come to."""

    qps_p90: float = 1000.0
    ne: float = 0.8
    preset: str = "exact"
    towers: Mapping[str, float] = field(default_factory=lambda: {"deep": 0.9, "cross": 0.95})
    status: Status = "completed"
    fingerprint: str = "f" * 64
    audit: str | None = "audit passed: every block is trained by the losses that the configuration declares"
    peak_memory_gib: float | None = None
    accuracy: float = 0.75
    backward_ms: float | None = None
    timeline: StepTimeline | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the configuration."""


def make_run(folder: Path, seed: int, planted: Planted) -> Path:
    """A run folder as training leaves it, checkpoints and features aside."""
    config = {"seed": seed, "schedule": {"preset": planted.preset}, "run": {"name": folder.name}, **planted.config}
    with FileRunLog(folder) as log:
        if planted.audit is not None:
            log.text("audit", f"**Which loss trains what**\n\n{planted.audit}")
        for step in range(1, 5):
            log.scalars(step, {"train/ne": planted.ne + 0.1 / step, "throughput/qps_mean": 0.9 * planted.qps_p90})
            if planted.backward_ms is not None:  # the first warms up
                log.scalars(step, {"time/backward_ms": planted.backward_ms + 50 * (step == 1)})
        log.scalars(4, {"eval/ne": planted.ne})
        if planted.peak_memory_gib is not None:
            log.final(4, {PEAK_MEMORY: planted.peak_memory_gib})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {"gpu": "none", "torch": "2.13.0", "git_commit": "abc", "command": f"train.py run.name={folder.name}"}
    (folder / "environment.json").write_text(json.dumps(environment))
    if planted.timeline is not None:
        planted.timeline.write(folder)
    Summary(
        status=planted.status,
        eval=EvalSummary(ne=planted.ne, rows=10, accuracy=planted.accuracy),
        towers={name: TowerSummary(ne=ne, auc=0.5) for name, ne in planted.towers.items()},
        throughput=ThroughputSummary(qps_p90=planted.qps_p90, steps=4, global_batch_size=GLOBAL_BATCH),
        train=TrainSummary(steps=4, rows=4 * GLOBAL_BATCH, ne=planted.ne),
        data=DataSummary(fingerprint=planted.fingerprint, unseen_share=0.0),
    ).write(folder)
    return folder


def make_sweep(
    folder: Path, arms: Mapping[str, Mapping[int, Planted]], failed: Sequence[tuple[str, int, str]] = ()
) -> Path:
    """A sweep's folder: planted runs by arm and seed, and points that failed, with their reasons."""
    points = []
    for arm, seeds in arms.items():
        for seed, planted in seeds.items():
            make_run(folder / "points" / f"{arm}{seed}", seed, planted)
            points.append(_point(arm, seed, "finished", None))
    points += [_point(arm, seed, "failed", reason) for arm, seed, reason in failed]
    record = {"format": 1, "name": "planted", "config": "x.yaml", "command": "erase-rec sweep --config x.yaml"}
    (folder / "sweep.json").write_text(json.dumps(record | {"points": points}))
    return folder


def _point(arm: str, seed: int, status: str, reason: str | None) -> dict[str, Any]:
    name = f"{arm}{seed}"
    return {
        "id": name,
        "arm": arm,
        "seed": seed,
        "overrides": [f"seed={seed}"],
        "folder": f"points/{name}",
        "status": status,
        "reason": reason,
        "seconds": 1.0,
    }

"""What a run logged, as a DataFrame."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from erase_rec.run_log import METRICS_FILE


def read_history(folder: Path) -> pd.DataFrame:
    """A row for each logged step of a run, resumed ones from their first step.

    Args:
        folder: the run folder, of a run that has ended or still trains.

    Returns:
        ``step`` and the tags of the run log: ``train/ne``, ``train/logloss``, ``tower/<name>/ne``,
        ``throughput/qps_mean``, ``lr/dense``, ``eval/ne`` ...; nan where a step did not log a tag, or it is undefined.
    """
    path = folder / METRICS_FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may have cut the last one short
    frame = pd.DataFrame(rows, columns=list(dict.fromkeys(["step", *(tag for row in rows for tag in row)])))
    return frame.astype({tag: "int64" if tag == "step" else "float64" for tag in frame.columns})

"""``train.py`` that writes down which rows each step trained on, for the audit of faults_data.py.

    python benchmarks/recorded_train.py RECORD FEATURE --config ... | --resume ...

RECORD gets one entry a finished step: the step, from 0, the number of its rows, and their table rows of the sparse
feature FEATURE, which must have one value a row. An entry is written at once and in one piece, so that a killed process
leaves whole entries.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from erase_rec.batch import Batch
from erase_rec.cli.main import app, run
from erase_rec.protocols import StepOutput
from erase_rec.schedule.step import ScheduledStep
from erase_rec.training_loop import TrainingLoop


def record(path: str, feature: str) -> None:
    """From now on every step of a training run is written to ``path``."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    train, fit = ScheduledStep.__call__, TrainingLoop.fit
    running: list[TrainingLoop] = []

    def recorded_fit(trainer: TrainingLoop) -> str:
        running.append(trainer)
        return fit(trainer)

    def recorded_step(step: ScheduledStep, batch: Batch, *, measure: bool = False) -> StepOutput:
        output = train(step, batch, measure=measure)
        if running:  # the audit before training takes a step of its own
            trainer = running[0]
            names = [each.name for each in trainer.parts.config.features.sparse]
            assert batch.sparse.single_valued
            rows = batch.sparse.values.view(len(names), -1)[names.index(feature)].cpu().numpy()
            os.write(file, np.array([trainer.position.step, len(rows), *rows], dtype=np.int64).tobytes())
        return output

    TrainingLoop.fit = recorded_fit  # type: ignore[method-assign]
    ScheduledStep.__call__ = recorded_step  # type: ignore[method-assign]


if __name__ == "__main__":
    record(*sys.argv[1:3])
    sys.argv[1:] = ["train", *sys.argv[3:]]
    run(app)

"""Training from Python: ``Trainer(config).fit()``. The command line trains through it, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pandas as pd

from data.dataset import Datasets, build_datasets
from data.frames import from_pandas
from erase_rec.api.config import Config
from erase_rec.api.evaluation import evaluate
from erase_rec.api.history import read_history
from erase_rec.api.predictor import Predictor
from erase_rec.api.run import Run
from erase_rec.callbacks import Callback
from erase_rec.config import schema
from erase_rec.errors import UserError
from erase_rec.run_folder import RunFolder
from erase_rec.summary import Evaluation, Summary


class Trainer:
    """Trains a model, evaluates it and predicts with it; everything is kept in a run folder, as on the command line.

    Several may be used in one process, one after the other: what :meth:`fit` sets for the whole process (threads,
    random generators, signal handlers) is put back at its end. Under ``torchrun`` every rank runs the same program.
    """

    def __init__(
        self,
        config: Config,
        *,
        train: pd.DataFrame | None = None,
        eval: pd.DataFrame | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
    ) -> None:
        """Reads nothing yet.

        Args:
            config: what to train.
            train: training rows, for a configuration with ``data.kind: pandas``; those that ``data.split`` and
                ``data.eval_fraction`` name are held out.
            eval: rows to evaluate; None: those held out of ``train``, if any.
            callbacks: told of steps, logs, evaluations and checkpoints, in this order.
            progress: show what the run does: a bar on a terminal, a line that changes in a notebook.
        """
        self._config = config
        self._resumed: tuple[Path, tuple[str, ...]] | None = None
        self._train, self._eval = train, eval
        self._callbacks, self._progress = tuple(callbacks), progress
        self._run: Run | None = None
        self._predictor: Predictor | None = None

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        overrides: Sequence[str] = (),
        *,
        train: pd.DataFrame | None = None,
        eval: pd.DataFrame | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
    ) -> Self:
        """A trainer whose :meth:`fit` goes on with a run from its last checkpoint, on the CPU bit for bit.

        Args:
            folder: the run folder.
            overrides: ``key=value`` texts that change no batch, such as ``train.epochs=3``.
            train: the run's DataFrames, which its folder does not hold.
            eval: likewise.
            callbacks: as of a new trainer.
            progress: likewise.

        Raises:
            UserError: the folder is not one of a run.
        """
        path = Path(folder)
        written = Config.from_yaml(RunFolder.open(path).config)
        trainer = cls(written, train=train, eval=eval, callbacks=callbacks, progress=progress)
        trainer._resumed = (path, tuple(overrides))
        return trainer

    def fit(self) -> Summary:
        """Trains to the end, with evaluations and checkpoints on the way.

        A second call trains anew, in another folder; that of a trainer from :meth:`resume` goes on once more.

        Returns:
            What the run came to, which is also in ``summary.json``.

        Raises:
            UserError: the configuration or the data are not as they must be.
            CallbackError: a callback raised; the newest checkpoint is kept.
            KeyboardInterrupt: somebody interrupted; :meth:`resume` goes on.
        """
        run = Run(build_datasets if self._train is None else self._open_frames, self._callbacks, self._progress)
        try:
            if self._resumed is None:
                run.start(self._config)
            else:
                run.resume(*self._resumed)
        finally:
            if run.folder is not None:  # else it never began, and the one before it is the last
                self._run, self._predictor = run, None
        return self.summary

    def _open_frames(self, config: schema.Config, **options: Any) -> Datasets:
        assert self._train is not None
        return from_pandas(config, self._train, self._eval, **options)

    @property
    def run(self) -> Run:
        """The last run, also one that failed.

        Raises:
            UserError: none has begun.
        """
        if self._run is None:
            raise UserError("the trainer has no run yet; call fit() first")
        return self._run

    @property
    def folder(self) -> Path:
        """The run folder, also of a run that failed.

        Raises:
            UserError: no run has begun.
        """
        folder = self.run.folder
        assert folder is not None
        return folder.path

    @property
    def summary(self) -> Summary:
        """What the last run came to, also one that was interrupted or failed.

        Raises:
            UserError: no run has ended.
        """
        if self.run.summary is None:
            raise UserError("the run failed before its first step: it has no summary")
        return self.run.summary

    @property
    def history(self) -> pd.DataFrame:
        """What the last run logged, a row a step; see :func:`erase_rec.api.history.read_history`.

        Raises:
            UserError: no run has begun.
        """
        return read_history(self.folder)

    def evaluate(self, frame: pd.DataFrame | None = None) -> Evaluation:
        """Scores rows with the run's best checkpoint (without evaluations: the newest).

        Args:
            frame: labelled rows, with columns as in training; None: the rows that the run held out.

        Raises:
            UserError: no run has begun, it held out no rows, or the rows cannot be read.
        """
        if frame is not None:
            return evaluate(self.folder, eval=frame).evaluation
        return evaluate(self.folder, train=self._train, eval=self._eval).evaluation

    def predict(self, frame: pd.DataFrame, *, keep: Sequence[str] = ()) -> pd.DataFrame:
        """Scores unlabelled rows with the run's best checkpoint; see :meth:`erase_rec.Predictor.predict`.

        Args:
            frame: rows with the columns that the features read.
            keep: columns that the result carries along.

        Raises:
            UserError: no run has begun, or the rows cannot be read.
        """
        if self._predictor is None:
            self._predictor = Predictor.load(self.folder)
        return self._predictor.predict(frame, keep=keep)

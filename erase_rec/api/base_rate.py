"""The constant prediction that NE compares with: ``eval.base_rate``."""

from __future__ import annotations

from collections.abc import Callable

from erase_rec.config.schema import Config
from erase_rec.errors import UserError
from erase_rec.run_folder import RunFolder
from erase_rec.summary import Summary

_ROWS = {
    "eval": "the held-out rows",
    "train": "all training rows",
    "window": "the training rows of the last window of the run log",
}


def base_rate_said(config: Config) -> str:
    """What NE compares with, for people."""
    sampled = config.eval.base_rate != "eval" and config.data.negative_sampling_rate is not None
    note = ", corrected for the negatives that were left out" if sampled else ""
    return f"NE compares with the share of clicks in {_ROWS[config.eval.base_rate]}{note} (eval.base_rate)"


def base_rate_of(config: Config, train: float, recent: Callable[[], float]) -> Callable[[], float | None]:
    """The constant at each evaluation of a run; None: the base rate of the held-out rows.

    Args:
        config: of the run.
        train: share of clicks in the training rows that are trained on.
        recent: the same of the last window of the run log; collective.
    """
    match config.eval.base_rate:
        case "eval":
            return lambda: None
        case "train":
            return lambda: _of_all_rows(train, config.data.negative_sampling_rate)
        case "window":
            return lambda: _of_all_rows(recent(), config.data.negative_sampling_rate)


def base_rate_of_run(config: Config, trained: Config, folder: RunFolder) -> float | None:
    """The constant for a run's checkpoint, which is that of its last evaluation; None: that of the rows themselves.

    Args:
        config: of the evaluation.
        trained: of the run.
        folder: of the run.

    Raises:
        UserError: the run has no summary, evaluated no rows, or compared with another constant.
    """
    kind = config.eval.base_rate
    if kind == "eval":
        return None
    if (used := trained.eval.base_rate) != kind:
        raise UserError(
            f"eval.base_rate: {kind}: the training rows are not read again, and the run in {folder.path} kept the base "
            f"rate of eval.base_rate: {used}; use eval.base_rate={used} or eval.base_rate=eval"
        )
    rate: float | None = (Summary.read(folder.path).eval.model_extra or {}).get("ne_base_rate")
    if rate is None:
        raise UserError(
            f"eval.base_rate: {kind}: the run in {folder.path} evaluated no rows, so that it kept no base rate; use "
            "eval.base_rate=eval"
        )
    return rate


def _of_all_rows(rate: float, kept_negatives: float | None) -> float:
    """Share of clicks in all rows; ``rate`` is that where ``kept_negatives`` of the rows without one are left."""
    return rate if kept_negatives is None else rate * kept_negatives / (rate * kept_negatives + 1.0 - rate)

"""Whether the rows are those that a configuration is meant for: ``data.expected``."""

from __future__ import annotations

from data.errors import DataError
from data.loader import Loader
from erase_rec.config.schema import ExpectedConfig

RATE_TOLERANCE = 5e-4
"""Protocols give the rate of clicks of all rows; that of a random part of a million is this near."""


def check_expected(expected: ExpectedConfig | None, train: Loader, held_out: Loader | None) -> None:
    """Compares the numbers of rows, and the share of clicks in the training rows.

    Raises:
        DataError: any is another; all of them are named.
    """
    if expected is None:
        return
    found_eval = 0 if held_out is None else held_out.num_rows
    wrong = [
        f"data.expected.{key}: expected {count:,} {rows} rows, found {found:,}"
        for key, count, rows, found in (
            ("train_rows", expected.train_rows, "training", train.num_rows),
            ("eval_rows", expected.eval_rows, "held-out", found_eval),
        )
        if count is not None and count != found
    ]
    rate = expected.label_rate
    if rate is not None and abs(rate - train.base_rate) > RATE_TOLERANCE:
        wrong.append(
            f"data.expected.label_rate: expected a share of clicks of {rate:.4f} (to {RATE_TOLERANCE}) in the training "
            f"rows, found {train.base_rate:.4f}"
        )
    if wrong:
        way_out = "these are not the configuration's files; name others, or set data.expected=null to train on them"
        raise DataError("\n".join([*wrong, way_out]))

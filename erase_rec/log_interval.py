"""When a step is logged: as often as asked for, and more rarely the longer a run is.

``metrics.jsonl`` and TensorBoard's event files get a row each time, of about 50 bytes a tag and file. Were the interval
kept for ever, a run of months would fill the disk and no chart could be drawn of it. So it doubles whenever the steps
double beyond :data:`FULL_ROWS` rows: the number of rows grows with the logarithm of the steps. It follows from the step
alone, so a resumed run logs the same steps.
"""

from __future__ import annotations

FULL_ROWS = 10_000
"""Rows at the interval that was asked for. After them half as many come with each doubling of the steps."""


def log_interval(step: int, every_steps: int) -> int:
    """Steps between two rows around ``step``.

    Args:
        step: updates done, at least 1.
        every_steps: ``train.log_every_steps``.
    """
    doublings = ((step - 1) // (FULL_ROWS * every_steps)).bit_length()
    return every_steps << doublings


def ends_interval(step: int, every_steps: int) -> bool:
    """Whether an interval ends with the step, in a run of any length."""
    return step % log_interval(step, every_steps) == 0


def is_logged(step: int, every_steps: int, total_steps: int) -> bool:
    """Whether the step is logged; the last one always is."""
    return step == total_steps or ends_interval(step, every_steps)


def most_rows(total_steps: int, every_steps: int) -> int:
    """An upper bound on the rows of a run."""
    doublings = ((total_steps - 1) // (FULL_ROWS * every_steps)).bit_length()
    return min(total_steps // every_steps, FULL_ROWS + doublings * FULL_ROWS // 2) + 1

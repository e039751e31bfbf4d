"""How many turns of how many steps fit into the time that a user gives."""

from __future__ import annotations

from dataclasses import dataclass

from erase_rec.bench.turns import UNTIMED_STEPS

FEWEST_TURNS = 5
"""The interval of a speed is made of turns; with fewer it says nothing."""
MOST_TURNS = 12
MOST_STEPS = 50
WARMUP = {False: 2, True: 10}
"""By whether there is CUDA, where steps are captured meanwhile."""
SHARE = 0.7
"""Of the time, for the turns: building the ways, and looking closer at one of them, take the rest."""


@dataclass(frozen=True)
class Pace:
    """Turns of each way, timed steps of a turn, and steps before the first."""

    repeats: int
    steps: int
    warmup: int


def pace(seconds: float, step_s: float, ways: int, *, on_cuda: bool) -> Pace:
    """As many turns as fit, of as many steps; never fewer than make an interval.

    Args:
        seconds: that are left; may be below 0.
        step_s: time of a step of a slow way; 0: not known.
        ways: that take turns, the A/A pair counted.
        on_cuda: where they run.
    """
    warmup = WARMUP[on_cuda]
    each = SHARE * seconds / (max(step_s, 1e-4) * ways) - warmup
    for repeats in range(MOST_TURNS, FEWEST_TURNS, -1):
        steps = int(each / repeats) - UNTIMED_STEPS
        if steps >= repeats:  # rather a few longer turns than many short ones
            return Pace(repeats, min(steps, MOST_STEPS), warmup)
    return Pace(FEWEST_TURNS, max(1, min(int(each / FEWEST_TURNS) - UNTIMED_STEPS, MOST_STEPS)), warmup)

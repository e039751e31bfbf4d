"""Points of a search: drawn by Optuna, some at a time, from what the earlier ones came to.

Nothing of the search is kept beside the runs: the sampler is seeded and told in the order of drawing, so that a sweep
that goes on draws the same trials again and finds them finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from statistics import fmean
from typing import TYPE_CHECKING, Any

from erase_rec.config.catalog import Catalog
from erase_rec.errors import UserError
from erase_rec.sweep.file import ReadSweep, SearchConfig, Space
from erase_rec.sweep.points import Arm, Point, label_of, layered, leaves, load_arms, points_of, shared_layers

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Cost = Callable[[Point], float]
"""What a point came to, lower is better; nan where it failed."""


def check_search(sweep: ReadSweep, overrides: Sequence[str], *, catalog: Catalog) -> None:
    """Checks what can be checked before anything runs.

    Raises:
        UserError: Optuna is not installed.
        ConfigError: an end of the space, or a choice, is no valid configuration.
    """
    assert sweep.file.search is not None
    if find_spec("optuna") is None:
        raise UserError("search: needs Optuna; install it with: pip install 'erase-rec[search]'")
    load_arms(_corners(sweep.file.search, sweep, overrides), sweep, catalog=catalog)


def draw_points(sweep: ReadSweep, overrides: Sequence[str], *, catalog: Catalog, cost: Cost) -> Iterator[list[Point]]:
    """All points so far, again and again: those of a list have to end before the next list is asked for.

    Args:
        sweep: has a search.
        overrides: of the command line; both passed :func:`check_search`.
        catalog: what configurations may name.
        cost: is asked for points that have ended.

    Raises:
        ConfigError: a point is no valid configuration, though the ends of the space are.
    """
    import optuna

    search = sweep.file.search
    assert search is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study = optuna.create_study(sampler=samplers[search.sampler](seed=search.seed))
    distributions = {key: _distribution(space) for key, space in search.space.items()}
    points: dict[str, Point] = {}
    for first in range(0, search.trials, search.at_once):
        drawn = []
        for _ in range(first, min(first + search.at_once, search.trials)):
            trial = study.ask(distributions)
            values = {key: _value(space, trial.params[key]) for key, space in search.space.items()}
            own = list(points_of([_arm(f"trial {trial.number}", values, sweep, overrides)], sweep, catalog=catalog))
            points |= {point.id: point for point in own if point.id not in points}  # drawn twice, run once
            drawn.append((trial, own))
        yield list(points.values())
        for trial, own in drawn:
            mean = fmean(map(cost, own))
            if math.isnan(mean):
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, mean)


def best_arm(points: Sequence[Point], cost: Cost) -> str | None:
    """The arm of the lowest mean cost among those whose points all have one; None where there is none."""
    costs: dict[str, list[float]] = {}
    for point in points:
        costs.setdefault(point.arm, []).append(cost(point))
    means = {arm: mean for arm, values in costs.items() if not math.isnan(mean := fmean(values))}
    return min(means, key=means.__getitem__, default=None)


def _corners(search: SearchConfig, sweep: ReadSweep, overrides: Sequence[str]) -> list[Arm]:
    """Arms in which every value of ``choices`` and every end of a range occurs."""
    ends = {
        key: list(space.choices) if space.choices else [_value(space, space.low), _value(space, space.high)]
        for key, space in search.space.items()
    }
    most = max(map(len, ends.values()))
    corners = [{key: values[min(turn, len(values) - 1)] for key, values in ends.items()} for turn in range(most)]
    return [_arm("values", values, sweep, overrides) for values in corners]


def _arm(name: str, values: dict[str, Any], sweep: ReadSweep, overrides: Sequence[str]) -> Arm:
    below, above = shared_layers(sweep, overrides)
    own = [each for key, value in values.items() for each in leaves(key, value, sweep.place("search", "space", key))]
    return Arm(f"{name} {label_of(values)}", tuple(layered(below, own, above)))


def _distribution(space: Space) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if space.choices:  # by position, since a choice may be a list or a section
        return CategoricalDistribution(range(len(space.choices)))
    assert space.low is not None
    assert space.high is not None
    if space.whole:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(space.low, space.high, log=space.log)


def _value(space: Space, drawn: Any) -> Any:
    """As in a sweep's file: text, or a choice as it was written."""
    if space.choices:
        return space.choices[drawn]
    return str(int(drawn)) if space.whole else f"{drawn:.6g}"

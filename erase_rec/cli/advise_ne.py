"""What the user's own runs say of the NE of cut towers, through the comparison of ``erase-rec compare``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from erase_rec.advice.facts import KnownNe
from erase_rec.cli.compare import ASIDE, SeedRun, SeedRuns, arms_of, gap_verdict, paired, read_run
from erase_rec.config.schema import Config
from erase_rec.errors import UserError
from eval.arms import differences, flat, shortened
from eval.comparison import compare
from eval.report.records import collect

_MODEL = ("features.", "over_arch.", "embedding.dim")
_OF_A_TOWER = (".kind", ".params.", ".inputs.")


def known_ne(folders: Sequence[Path], config: Config) -> KnownNe:
    """The gap between the cut and the exact runs in ``folders``.

    Args:
        folders: run folders, a sweep's folder, or folders of either; together one exact arm and one that cuts towers.
        config: the model that advice is asked for.

    Raises:
        UserError: there are not these two arms, they have no scores, or they are of another model.
    """
    runs = [read_run(record.path) for record in collect(folders).runs]
    asked = _model_keys(dict(flat(config.model_dump(mode="json", exclude=set(ASIDE)))))
    for run in runs:
        if other := differences(asked, _model_keys(run.keys)):
            raise UserError(f"--runs: {run.path} is of another model: there {shortened(other)}; name runs of this one")
    exact = _arm("keeps every gradient", [run for run in runs if not _cuts(run)])
    cut = _arm("cuts towers", [run for run in runs if _cuts(run)])
    gap = compare(*paired("--runs", cut, exact))
    low, mid, high = (None if math.isnan(bound) else bound for bound in (gap.total.low, gap.total.mid, gap.total.high))
    assert mid is not None
    return KnownNe(gap_verdict(gap), low, mid, high, gap.seeds, [str(run.path) for run in runs])


def _cuts(run: SeedRun) -> bool:
    return any(key.startswith("towers.") and key.endswith(".detach") and value for key, value in run.keys.items())


def _arm(does: str, runs: list[SeedRun]) -> SeedRuns:
    """The one arm of these runs."""
    arms = arms_of(runs)
    if not arms:
        raise UserError(f"--runs: found no run that {does}; expected runs of both kinds, such as a sweep of both")
    if len(arms) > 1:
        apart = differences(next(iter(arms[0].values())).keys, next(iter(arms[1].values())).keys)
        raise UserError(
            f"--runs: found {len(arms)} arms of which each {does} (they differ in {shortened(apart)}), expected one; "
            "name its runs"
        )
    return arms[0]


def _model_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the model that is trained, however it is trained."""

    def found() -> Iterator[tuple[str, Any]]:
        for key, value in keys.items():
            of_a_tower = key.startswith("towers.") and any(part in f"{key}." for part in _OF_A_TOWER)
            of_a_tower &= ".loss." not in key
            if of_a_tower or key.startswith(_MODEL):
                yield key, value

    return dict(found())

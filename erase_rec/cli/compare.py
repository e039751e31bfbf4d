"""``erase-rec compare``: normalized entropy of runs against reference runs, on the same held-out rows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # these load torch, which the command line does only after it was checked
    from erase_rec.advice.decision import NeVerdict
    from erase_rec.text_table import TextTable
    from eval.comparison import Arm, Gap, ScoredRun
    from eval.statistics import Interval

ASIDE = ("seed", "run", "distributed")
"""Sections that do not make another arm."""
_TOWER = "tower_"


def command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; those that differ in the seed alone are one arm.")],
    reference: Annotated[
        list[Path], typer.Option("--reference", help="A run folder of the reference arm; give it once a seed.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Also write the comparison as JSON here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the gaps here (.png, .svg, .pdf).")] = None,
) -> None:
    """Compare NE with intervals over seeds and over rows.

    Each run needs scores.parquet: train with eval.scores=true, or run erase-rec eval --checkpoint RUN --scores
    RUN/scores.parquet. Runs are paired by seed.
    """
    from eval.arms import differences
    from eval.comparison import compare, plot_gaps, summarize

    base = [read_run(path) for path in reference]
    base_arms = arms_of(base)
    if len(base_arms) > 1:
        differing = next(iter(differences(base[0].keys, next(iter(base_arms[1].values())).keys)))
        raise UserError(f"--reference: the runs are of several arms: they differ in {differing}; name one arm's runs")
    arms = {_label(arm, base_arms[0]): arm for arm in arms_of([read_run(path) for path in runs])}
    gaps: dict[str, Gap] = {}
    summaries = {"reference": summarize([run.scores for run in base_arms[0].values()])}
    for name, arm in arms.items():
        pairs = paired(name, arm, base_arms[0])
        gaps[name] = compare(*pairs)
        summaries[name] = summarize([run.scores for run in arm.values()])
    _show(summaries, gaps)
    try:
        if out is not None:
            record = {"arms": _plain(summaries), "gaps_pct": _plain(gaps), "runs": _runs_of(base_arms[0], arms)}
            out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if plot is not None:
            plot_gaps(gaps, "the reference", plot)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the comparison: {error}") from error


@dataclass(frozen=True)
class SeedRun:
    """A run folder that was scored."""

    path: Path
    seed: int
    keys: Mapping[str, Any]
    """The configuration, flat, without what does not make another arm."""
    scores: ScoredRun


SeedRuns = dict[int, SeedRun]
"""Runs of one arm by their seeds."""


def read_run(path: Path) -> SeedRun:
    """A run folder's configuration and scores.

    Raises:
        UserError: it is no run folder, or has no scores of both classes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from erase_rec.api.assembly import ContentCatalog
    from erase_rec.config.load import load_config
    from erase_rec.run_folder import RunFolder
    from eval.arms import flat
    from eval.comparison import ScoredRun

    folder = RunFolder.open(path)
    config = load_config(str(folder.config), catalog=ContentCatalog()).config
    try:
        table = pq.read_table(folder.scores).sort_by("row_id")
    except FileNotFoundError:
        raise UserError(
            f"{path}: the run has no {folder.scores.name}; train with eval.scores=true, or run: erase-rec eval "
            f"--checkpoint {path} --scores {folder.scores}"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{folder.scores}: not readable ({error}); write it again with erase-rec eval") from error
    columns = {name: torch.from_numpy(table[name].to_numpy().copy()) for name in table.column_names}
    positives = int(columns["label"].sum())
    if positives in (0, len(columns["label"])):
        raise UserError(f"{folder.scores}: NE needs held-out rows of both classes, found {positives} positive rows")
    keys = config.model_dump(mode="json", exclude=set(ASIDE))
    return SeedRun(
        path=path,
        seed=config.seed,
        keys=dict(flat(keys)),
        scores=ScoredRun(
            row_ids=columns["row_id"],
            label=columns["label"].double(),
            logit=columns["logit"].double(),
            towers={name.removeprefix(_TOWER): columns[name].double() for name in columns if name.startswith(_TOWER)},
        ),
    )


def arms_of(runs: list[SeedRun]) -> list[SeedRuns]:
    """Runs that differ in the seed alone, by seed.

    Raises:
        UserError: two runs are of one arm and one seed.
    """
    arms: list[SeedRuns] = []
    for run in runs:
        arm = next((arm for arm in arms if next(iter(arm.values())).keys == run.keys), None)
        if arm is None:
            arms.append({run.seed: run})
        elif run.seed in arm:
            raise UserError(
                f"{arm[run.seed].path} and {run.path} are one arm and one seed ({run.seed}); name one of them"
            )
        else:
            arm[run.seed] = run
    return arms


def _label(arm: SeedRuns, reference: SeedRuns) -> str:
    """What sets an arm apart from the reference."""
    from eval.arms import differences, shortened

    found = differences(next(iter(reference.values())).keys, next(iter(arm.values())).keys)
    return shortened(found) or "same configuration"


def paired(name: str, arm: SeedRuns, reference: SeedRuns) -> tuple[dict[int, ScoredRun], dict[int, ScoredRun]]:
    """Runs of both arms by the seeds that they share.

    Raises:
        UserError: there is none, or the runs of a seed were scored on other rows.
    """
    seeds = sorted(arm.keys() & reference.keys())
    if not seeds:
        raise UserError(
            f"{name}: no seed is shared: the arm has {sorted(arm)}, the reference {sorted(reference)}; NE is compared "
            "between runs of the same seed"
        )
    for seed in seeds:
        if not arm[seed].scores.same_rows(reference[seed].scores):
            raise UserError(
                f"{arm[seed].path} and {reference[seed].path} were not scored on the same held-out rows; NE can only "
                "be compared on the same rows"
            )
    for seed in sorted(arm.keys() ^ reference.keys()):
        typer.echo(f"{name}: seed {seed} is on one side only and is left out of the gap", err=True)
    return {seed: arm[seed].scores for seed in seeds}, {seed: reference[seed].scores for seed in seeds}


def _show(summaries: Mapping[str, Arm], gaps: Mapping[str, Gap]) -> None:
    from erase_rec.text_table import table_console

    console = table_console()
    for table in (_gap_table(gaps), _arm_table(summaries), _tower_table(summaries)):
        if table.rows:
            console.print(table.rich())


def _gap_table(gaps: Mapping[str, Gap]) -> TextTable:
    from erase_rec.text_table import TextTable

    rows = [
        (
            name,
            str(len(gap.seeds)),
            f"{gap.rows:,}",
            _interval(gap.over_seeds),
            _interval(gap.over_seeds_bootstrap),
            _interval(gap.over_rows),
            _interval(gap.total),
            gap_verdict(gap),
        )
        for name, gap in gaps.items()
    ]
    header = ("arm", "seeds", "rows", "over seeds (t)", "over seeds (bootstrap)", "over rows", "both", "verdict")
    return TextTable("NE gap to the reference in %, 95 % intervals; below 0 the arm is better", header, tuple(rows))


def _arm_table(summaries: Mapping[str, Arm]) -> TextTable:
    from erase_rec.text_table import TextTable

    rows = [
        (name, _interval(arm.ne, 5), f"{arm.auc:.5f}", f"{arm.logloss:.5f}", f"{arm.calibration:.4f}")
        for name, arm in summaries.items()
    ]
    return TextTable("held-out metrics, means over seeds", ("arm", "NE", "AUC", "logloss", "calibration"), tuple(rows))


def _tower_table(summaries: Mapping[str, Arm]) -> TextTable:
    from erase_rec.text_table import TextTable

    names = list(dict.fromkeys(tower for arm in summaries.values() for tower in arm.towers))
    rows = [
        (tower, *(f"{arm.towers[tower]:.5f}" if tower in arm.towers else "-" for arm in summaries.values()))
        for tower in names
    ]
    return TextTable("NE of the towers' local logits, means over seeds", ("tower", *summaries), tuple(rows))


def _interval(interval: Interval, digits: int = 3) -> str:
    bounds = "" if math.isnan(interval.low) else f" [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
    return f"{interval.mid:.{digits}f}{bounds}"


def gap_verdict(gap: Gap) -> NeVerdict:
    """What the interval over seeds and rows says."""
    if math.isnan(gap.total.low):
        return "one seed: no verdict"
    if not gap.total.excludes_zero:
        return "inside the noise"
    return "better" if gap.total.mid < 0 else "worse"


def _plain(entries: Mapping[str, Arm] | Mapping[str, Gap]) -> dict[str, Any]:
    """For JSON, where nan is null."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [clean(entry) for entry in value]
        return None if isinstance(value, float) and math.isnan(value) else value

    return {name: clean(asdict(entry)) for name, entry in entries.items()}


def _runs_of(reference: SeedRuns, arms: Mapping[str, SeedRuns]) -> dict[str, list[str]]:
    every = {"reference": reference, **arms}
    return {name: [str(arm[seed].path) for seed in sorted(arm)] for name, arm in every.items()}

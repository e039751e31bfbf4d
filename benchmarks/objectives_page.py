"""The page of the NE gaps: ``ne-gap.md``, ``ne-gap.json`` and a picture a set, from the runs of ``objectives.py``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from objectives_runs import Result

from eval.comparison import Gap, ScoredRun, compare, ne_of, plot_gaps, summarize

if TYPE_CHECKING:
    from objectives import Chosen

ROOT = Path(__file__).resolve().parents[1]
TABLE_1 = ROOT / "docs/results/table1-h200/table.json"
PRESET_ARM = "joint"
"""The `erase` preset as configs/ctr_erase.yaml has it: `joint` targets, additive logits."""
SYNTHETIC_LIMIT_PCT, REAL_LIMIT_PCT = 0.02, 0.1
"""The interval's upper end is to be below."""

MARK = "<!-- Below: written by benchmarks/objectives.py report -->"
"""What stands above it is text and stays."""

Row = Mapping[str, Any]


def measure(
    name: str, chosen: Sequence[Chosen], tested: Sequence[Result]
) -> tuple[list[dict[str, Any]], dict[str, Gap]]:
    """A row of results for each arm and its gap, over the seeds that every arm has; nothing below two."""
    of_choice = {(each.arm, each.variant) for each in chosen}
    runs: dict[str, dict[int, Result]] = {}
    for result in tested:
        if result.job.group == name and (result.job.arm, result.job.variant) in of_choice:
            runs.setdefault(result.job.arm, {})[result.job.seed] = result
    arms = [each for each in chosen if each.arm in runs]
    seeds = sorted(set.intersection(*(set(runs[each.arm]) for each in arms))) if arms else []
    if len(seeds) < 2 or len(arms) < len(chosen):
        return [], {}
    scored = {each.arm: {seed: scores(runs[each.arm][seed]) for seed in seeds} for each in arms}
    reference = min((each for each in arms if each.arm.startswith("exact")), key=lambda each: each.ne).arm
    gaps = {each.arm: compare(scored[each.arm], scored[reference]) for each in arms}
    rows = []
    for each in arms:
        summary, gap = summarize(list(scored[each.arm].values())), gaps[each.arm]
        rows.append(
            {
                "dataset": name,
                "arm": each.arm,
                "reference": reference,
                "seeds": len(seeds),
                "rows": gap.rows,
                "ne": summary.ne.mid,
                "ne_sd": stdev(ne_of(run.logit, run.label) for run in scored[each.arm].values()),
                "gap_pct": gap.total.mid,
                "ci_low_pct": gap.total.low,
                "ci_high_pct": gap.total.high,
                "seeds_ci_low_pct": gap.over_seeds.low,
                "seeds_ci_high_pct": gap.over_seeds.high,
                "auc": summary.auc,
                "rows_per_s": mean(runs[each.arm][seed].rows_per_s for seed in seeds),
                "validation_ne": each.ne,
                "settings": each.variant,
            }
        )
    del gaps[reference]
    return rows, gaps


def scores(result: Result) -> ScoredRun:
    """The test rows of a run."""
    assert result.job.scores is not None
    file = Path(result.job.scores)
    logit = torch.from_numpy(np.load(file)).double()
    label = torch.from_numpy(np.load(file.with_name("label.npy"))).double()
    return ScoredRun(torch.arange(len(label)), label, logit, {})


def write_report(
    chosen: Mapping[str, Sequence[Chosen]],
    tested: Sequence[Result],
    out: Path,
    *,
    more: Sequence[Row] = (),
    measured: str = "",
) -> None:
    """Writes ``OUT.json``, ``OUT.md`` and ``OUT-SET.png``; sets without two seeds of every arm are left out.

    Args:
        chosen: of each set, what was best for each arm.
        tested: the runs on test rows.
        out: path without ending.
        more: rows of another machine's report, whose pictures are put beside this one's by hand.
        measured: when, where and of which commit, for people.
    """
    rows: list[dict[str, Any]] = []
    for name, of_set in chosen.items():
        found, gaps = measure(name, of_set, tested)
        rows += found
        if gaps:
            plot_gaps(gaps, found[0]["reference"], out.with_name(f"{out.name}-{name}.png"))
    rows += more
    out.with_suffix(".json").write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    file = out.with_suffix(".md")
    above = file.read_text(encoding="utf-8").partition(MARK)[0] if file.exists() else TITLE
    file.write_text(above + page(rows, out.name, measured), encoding="utf-8")


def page(rows: Sequence[Row], stem: str, measured: str) -> str:
    """The page from its mark on; pictures are beside it."""
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    parts = [MARK, "", measured, INTRODUCTION, *preset(rows, sets), *all_arms(rows, sets)]
    for name in sets:
        parts += of_set([row for row in rows if row["dataset"] == name], f"{stem}-{name}.png")
    return "\n".join([*parts, *table_1()]) + "\n"


def preset(rows: Sequence[Row], sets: Sequence[str]) -> list[str]:
    """What the default came to, against the targets."""
    lines = ["## The `erase` preset against the strongest exact arm", ""]
    lines += [
        "| set | test rows | seeds | reference | NE | gap, % [95 %] | upper end, limit |",
        "|---|---|---|---|---|---|---|",
    ]
    found = [row for name in sets for row in rows if (row["dataset"], row["arm"]) == (name, PRESET_ARM)]
    for row in found:
        limit = SYNTHETIC_LIMIT_PCT if row["dataset"].startswith("synthetic") else REAL_LIMIT_PCT
        verdict = "met" if row["ci_high_pct"] <= limit else "not met"
        cells = (row["dataset"], f"{row['rows']:,}", row["seeds"], f"`{row['reference']}`", f"{row['ne']:.5f}")
        lines.append(
            f"| {' | '.join(map(str, cells))} | {interval(row)} | {row['ci_high_pct']:+.3f}, {limit}: {verdict} |"
        )
    real = [row for row in found if not row["dataset"].startswith("synthetic")]
    for what, over in (("these sets", found), ("the real ones of them", real)):
        if over:
            low, middle, high = of_mean(over)
            lines += ["", f"Mean gap over {what}: {middle:+.3f} % [{low:+.3f}, {high:+.3f}]."]
    return [*lines, ""]


def of_mean(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Mean of the gaps of independent sets, whose halves of intervals add up as deviations do."""
    middle = mean(row["gap_pct"] for row in rows)
    below, above = (
        math.sqrt(sum((row[end] - row["gap_pct"]) ** 2 for row in rows)) / len(rows)
        for end in ("ci_low_pct", "ci_high_pct")
    )
    return middle - below, middle, middle + above


def all_arms(rows: Sequence[Row], sets: Sequence[str]) -> list[str]:
    """Gaps of each arm on each set, the best mean first."""
    by_arm: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["dataset"]] = row
    lines = ["## All arms", "", "NE gap in per cent; bold: the 95 % interval excludes zero.", ""]
    lines += [f"| arm | {' | '.join(sets)} | mean |", "|---" * (len(sets) + 2) + "|"]

    def average(arm: str) -> float:
        return mean(row["gap_pct"] for row in by_arm[arm].values())

    for arm in sorted(by_arm, key=average):
        cells = [marked(by_arm[arm][name]) if name in by_arm[arm] else "" for name in sets]
        lines.append(f"| {arm} | {' | '.join(cells)} | {average(arm):+.3f} |")
    return [*lines, ""]


def marked(row: Row) -> str:
    """A gap, bold where it is one."""
    clear = row["ci_low_pct"] > 0 or row["ci_high_pct"] < 0
    return f"**{row['gap_pct']:+.2f}**" if clear else f"{row['gap_pct']:+.2f}"


def of_set(rows: Sequence[Row], picture: str) -> list[str]:
    """The table of one set, the best NE first."""
    name = rows[0]["dataset"]
    lines = [f"## {name}", ""]
    lines += [f"{rows[0]['seeds']} seeds, {rows[0]['rows']:,} test rows, against `{rows[0]['reference']}`.", ""]
    header = ("arm", "NE", "gap, % [95 %]", "over seeds alone", "AUC", "validation NE", "chosen there")
    lines += [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for row in sorted(rows, key=lambda row: float(row["ne"])):
        seeds = f"[{row['seeds_ci_low_pct']:+.3f}, {row['seeds_ci_high_pct']:+.3f}]"
        cells = (
            row["arm"],
            f"{row['ne']:.5f}",
            interval(row),
            seeds,
            f"{row['auc']:.5f}",
            f"{row['validation_ne']:.5f}",
        )
        lines.append(f"| {' | '.join(cells)} | {row['settings']} |")
    return [*lines, "", f"![NE gaps on {name}]({picture})", ""]


def interval(row: Row) -> str:
    """A gap with its interval."""
    return f"{row['gap_pct']:+.3f} [{row['ci_low_pct']:+.3f}, {row['ci_high_pct']:+.3f}]"


def table_1() -> list[str]:
    """NE gap against speed, of every row of Table 1."""
    arms = json.loads(TABLE_1.read_text(encoding="utf-8"))["arms"]
    base = arms[0]["qps_p90"]["mid"]
    lines = ["## NE gap against speed: every row of Table 1", "", TABLE_1_TEXT, ""]
    lines += ["| row | speed, times the baseline's | NE | NE gap, % [95 %] |", "|---|---|---|---|"]
    for arm in arms:
        gap = arm["ne_gap"] and arm["ne_gap"]["pct"]
        shown = f"{gap['mid']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]" if gap else "0"
        lines.append(f"| {arm['name']} | {arm['qps_p90']['mid'] / base:.2f} | {arm['ne']['mid']:.5f} | {shown} |")
    return lines


TITLE = "# NE gap of local objectives\n\n"

INTRODUCTION = """
Written by `python benchmarks/objectives.py report`; the numbers are those of `ne-gap.json`. What the arms are:
[objectives](../objectives.md).

**Protocol.** Rows of each real set are split 70/10/20 once for all. Every arm is trained at the same points (dense
rate, tables' optimizer and rate; `configs/sweeps/objectives_*.yaml`; those that every arm has finished) with seed 1,
evaluated twice an epoch on the validation rows and stopped after two evaluations without improvement; its best point
is kept. Then it is trained anew with several seeds, each stopped early by the validation rows in the same way, and
its best checkpoint scores the test rows, which no choice has seen. Synthetic rows: one epoch, scored at the end, with
rates chosen on another teacher's log. The reference is the exact arm that was best on the validation rows. Gaps are
paired over seeds on identical rows; intervals are 95 % and join two sources of chance, seeds (Student) and rows
(block bootstrap). Small sets have wide intervals. `rows_per_s` in the JSON is of runs side by side on one thread
each, and says little; speeds are measured in [h200-step](h200-step.md) and [Table 1](table1-h200/report.md).

<!-- not run: hours -->
```bash
ERASE_REC_DATA=/path/to/raw python benchmarks/objectives_data.py
python benchmarks/objectives.py search --jobs 2 && python benchmarks/objectives.py test --jobs 2 --seeds 10
# on a GPU; configs/sweeps/objectives_synthetic.yaml and configs/protocols/ say how its three logs are made
python benchmarks/objectives.py search synthetic_20m --runs runs/synthetic --jobs 4
python benchmarks/objectives.py test synthetic_20m synthetic_2m --runs runs/synthetic --jobs 4
python benchmarks/objectives.py report synthetic_20m synthetic_2m --runs runs/synthetic --out synthetic
python benchmarks/objectives.py report --more synthetic.json --out docs/results/ne-gap
```
"""

TABLE_1_TEXT = (
    "From [table1-h200](table1-h200/report.md): `ctr_erase.yaml` on one H200, 5 paired seeds; speed is that of QPS p90 "
    "in turns. The gap is to the baseline, one exact backward of the same model."
)

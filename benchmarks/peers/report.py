"""Tables of what ``run.py`` and ``speed.py`` measured, beside the best of this project's arms on the same test rows.

    python benchmarks/peers/report.py --results build/peers/results.jsonl --out docs/results/peers

Writes ``OUT.json``, a row a set and model, and the tables of ``OUT.md``: what stands there above :data:`MARK` is text
and stays. Models are held against each other by Welch's interval: seeds of different programs are no pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student

MARK = "<!-- Below: written by benchmarks/peers/report.py -->"
Row = dict[str, Any]


def rates_of(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """The point of the grid."""
    return tuple(result[name] for name in ("dense_lr", "table_optimizer", "table_lr"))


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row a set and model that has test runs."""
    rows = []
    for name, peer, model in dict.fromkeys((each["set"], each["peer"], each["model"]) for each in results):
        runs = [each for each in results if (each["set"], each["peer"], each["model"]) == (name, peer, model)]
        grid, tests = ([each for each in runs if each["test"] is test] for test in (False, True))
        if not tests:
            continue
        chosen = Counter(map(rates_of, tests)).most_common(1)[0][0]
        tests = [each for each in tests if rates_of(each) == chosen]
        found = [each["test_ne"] for each in tests]
        rows.append(
            {
                "dataset": name,
                "arm": f"{peer} {model}",
                "seeds": len(tests),
                "points": len(grid),
                "ne": statistics.mean(found),
                "ne_sd": statistics.stdev(found) if len(found) > 1 else None,
                "auc": statistics.mean(each["test_auc"] for each in tests),
                "validation_ne": min(min(each["valid_ne"]) for each in grid if rates_of(each) == chosen),
                "rates": list(chosen),
            }
        )
    return sorted(rows, key=lambda row: (row["dataset"], row["ne"]))


def with_own(rows: Sequence[Row], own: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Besides this project's arm with the best validation NE of each set, and its best detached one."""
    chosen = []
    for name in dict.fromkeys(row["dataset"] for row in rows):
        arms = [each for each in own if each["dataset"] == name]
        for kind, there in (("", arms), ("detached ", [each for each in arms if not each["arm"].startswith("exact")])):
            if there:
                best = min(there, key=lambda each: float(each["validation_ne"]))
                arm = f"erase-rec, best {kind}arm: {best['arm']}"
                same = {key: best[key] for key in ("dataset", "seeds", "ne", "ne_sd", "auc", "validation_ne")}
                chosen.append({**same, "arm": arm, "points": None, "rates": [best["settings"]]})
    return sorted([*rows, *chosen], key=lambda row: (row["dataset"], row["ne"]))


def welch(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[float, float, float]:
    """How far one mean NE is above another, in per cent of the other, with a 95 % interval over seeds."""
    parts = [row["ne_sd"] ** 2 / row["seeds"] for row in (ours, theirs)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (row["seeds"] - 1) for part, row in zip(parts, (ours, theirs), strict=True)
    )
    scale = 100 / theirs["ne"]
    middle, half = (
        scale * (ours["ne"] - theirs["ne"]),
        scale * float(student.ppf(0.975, freedom)) * math.sqrt(sum(parts)),
    )
    return middle - half, middle, middle + half


def verdicts(rows: Sequence[Row], own: Sequence[Mapping[str, Any]]) -> list[str]:
    """This project's best arm against the best peer, by validation NE, and by test NE, which nobody could know."""
    lines = []
    for title, key in (
        ("Each the best on the validation rows", "validation_ne"),
        ("Each the lowest on the test rows, looked at afterwards", "ne"),
    ):
        lines += [f"### {title}", "", "| set | our arm | NE | peer | NE | ours over it, % [95 %] | at or below |"]
        lines += ["|---" * 7 + "|"]
        for name in dict.fromkeys(row["dataset"] for row in rows):
            ours, theirs = (
                min((each for each in of if each["dataset"] == name), key=lambda each: float(each[key]))
                for of in (own, rows)
            )
            low, middle, high = welch(ours, theirs)
            verdict = ("yes" if middle <= 0 else "no") + ("" if low > 0 or high < 0 else ", not told apart")
            gap = f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]"
            cells = (name, ours["arm"], f"{ours['ne']:.5f}", theirs["arm"], f"{theirs['ne']:.5f}", gap, verdict)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return lines


def ne_tables(rows: Sequence[Row]) -> list[str]:
    """A table a set, the lowest NE first."""
    lines = []
    for name in dict.fromkeys(row["dataset"] for row in rows):
        lines += [f"### {name}", "", "| model | test NE | sd | AUC | validation NE | seeds | points | rates |"]
        lines += ["|---" * 8 + "|"]
        for row in rows:
            if row["dataset"] != name:
                continue
            deviation = "" if row["ne_sd"] is None else f"{row['ne_sd']:.5f}"
            rates = ", ".join(map(str, row["rates"] or ()))
            numbers = f"{row['ne']:.5f} | {deviation} | {row['auc']:.5f} | {row['validation_ne']:.5f}"
            lines.append(f"| {row['arm']} | {numbers} | {row['seeds']} | {row['points'] or ''} | {rates} |")
        lines.append("")
    return lines


def speed_table(speed: Mapping[str, Any]) -> list[str]:
    """Rows a second, and how many times as fast this project's exact DLRM is."""
    machine = speed["machine"]
    said = (
        f"{speed['rows']:,} rows, {speed['table_rows']:,} table rows, {machine['processor']}, cores {machine['cpus']}."
    )
    lines = [
        said,
        "",
        "| arm | rows/s | each turn | erase-rec dlrm exact over it, each turn | peak MiB |",
        "|---" * 5 + "|",
    ]
    for arm in speed["arms"]:
        turns, ratios = (", ".join(map(str, arm[key])) for key in ("turns", "first_arm_over_this"))
        lines.append(f"| {arm['arm']} | {arm['rows_per_s']:,} | {turns} | {ratios} | {arm['peak_mib']:,} |")
    return [*lines, ""]


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, nargs="+", default=[], help="of run.py; later ones go on from earlier ones"
    )
    parser.add_argument("--speed", type=Path, help="of speed.py")
    parser.add_argument("--own", type=Path, help="of benchmarks/objectives.py")
    parser.add_argument("--without", nargs="+", default=[], help="arms of --own that are no longer in the code")
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    arguments = parser.parse_args()
    lines = [line for file in arguments.results for line in file.read_text(encoding="utf-8").splitlines()]
    found = [json.loads(line) for line in dict.fromkeys(lines)]
    rows = rows_of(found)
    own = json.loads(arguments.own.read_text(encoding="utf-8")) if arguments.own else []
    own = [row for row in own if row["arm"] not in arguments.without]
    text = ["## Our best arm against the best peer", "", *verdicts(rows, own)] if own else []
    text += ["## NE on test rows", "", *ne_tables(with_own(rows, own))]
    if arguments.speed:
        text += [
            "## Training speed on a CPU",
            "",
            *speed_table(json.loads(arguments.speed.read_text(encoding="utf-8"))),
        ]
    page = arguments.out.with_suffix(".md")
    above = page.read_text(encoding="utf-8").partition(MARK)[0] if page.exists() else "# Peers on the same rows\n\n"
    page.write_text(above + "\n".join([MARK, "", *text]).rstrip() + "\n", encoding="utf-8")
    arguments.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

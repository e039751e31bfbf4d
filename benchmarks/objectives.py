"""Local objectives against the strongest exact arm, on test rows that no choice has seen.

    python benchmarks/objectives.py search movielens frappe --jobs 2   # every arm over the same grid, validation rows
    python benchmarks/objectives.py test movielens frappe --jobs 2     # the best of each arm, several seeds, test rows
    python benchmarks/objectives.py report movielens frappe --out docs/results/ne-gap

``search`` trains the points of ``configs/sweeps/objectives_SET.yaml``. ``test`` takes from them the settings with which
each arm was best, trains each arm anew with several seeds, each stopped early by the validation rows as in the search,
and scores the test rows with the best checkpoint.
``report`` compares every arm with the exact arm that was best on the validation rows, and writes ``OUT.json``, a list
of rows, ``OUT.md`` and a picture a set. Each goes on where it was stopped, and stops in time (``--limit-s``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from objectives_runs import Job, Result, read_results, run_all

from erase_rec.sweep.file import read_sweep
from erase_rec.sweep.points import expand_arms

ROOT = Path(__file__).resolve().parents[1]
REAL = ("movielens", "frappe", "adult", "sparrow", "kuaishou", "criteo")
"""The longest first."""
SYNTHETIC = ("synthetic_2m", "synthetic_20m")
"""Logs of a made-up teacher, for a GPU: one epoch each, with rates that were chosen on another teacher's log."""
SETS = (*REAL, *SYNTHETIC)


@dataclass(frozen=True)
class Chosen:
    """An arm with what was best for it on the validation rows.

    Attributes:
        arm: its name.
        variant: the point of the grid.
        ne: the best validation NE.
        overrides: that the set's configuration is changed by.
    """

    arm: str
    variant: str
    ne: float
    overrides: tuple[str, ...]


def searched(name: str) -> str:
    """The sweep in which a set's settings are looked for."""
    return "synthetic" if name in SYNTHETIC else name


def search_jobs(name: str) -> list[Job]:
    """The points of a set's sweep, all arms of one in a row: a search that is cut short is so for all arms alike."""
    sweep = read_sweep(f"sweeps/objectives_{name}.yaml")
    jobs = []
    for arm in expand_arms(sweep):
        name_of_arm, _, variant = arm.name.partition(" ")
        overrides = tuple(each.text for each in arm.overrides)
        jobs += [Job(name, name_of_arm, variant, seed, str(sweep.base), overrides) for seed in sweep.file.seeds]
    order = list(dict.fromkeys(job.variant for job in jobs))
    return sorted(jobs, key=lambda job: order.index(job.variant))


def choose(results: Sequence[Result], name: str) -> list[Chosen]:
    """The best point of each arm for a set, of those that every arm has; of equal ones the first.

    Raises:
        SystemExit: there is none.
    """
    results = [result for result in results if result.job.group == searched(name)]
    arms = list(dict.fromkeys(result.job.arm for result in results))
    variants = {arm: {each.job.variant for each in results if each.job.arm == arm} for arm in arms}
    shared = set.intersection(*variants.values()) if arms else set()
    if not shared:
        raise SystemExit("the search has no point that every arm has finished; run: objectives.py search")
    best: dict[str, Chosen] = {}
    for result in results:
        job, (ne, _) = result.job, result.best()
        if job.variant in shared and (job.arm not in best or ne < best[job.arm].ne):
            kept = tuple(text for text in job.overrides if not text.startswith("data."))
            best[job.arm] = Chosen(job.arm, job.variant, ne, kept)
    return list(best.values())


def only(chosen: Sequence[Chosen], arms: Sequence[str]) -> list[Chosen]:
    """Those named, or all if none is.

    Raises:
        SystemExit: there is no arm of that name.
    """
    if unknown := set(arms) - {each.arm for each in chosen}:
        raise SystemExit(f"the search has no arm {', '.join(sorted(unknown))}")
    return [each for each in chosen if each.arm in arms or not arms]


def final_jobs(name: str, chosen: Sequence[Chosen], seeds: int, folder: Path) -> list[Job]:
    """Each arm anew, all arms of a seed in a row."""
    kind = "objectives" if name in REAL else "protocols"
    scores = folder.resolve() / "scores" / name
    return [
        Job(
            name,
            each.arm,
            each.variant,
            seed,
            str(ROOT / f"configs/{kind}/{name}.yaml"),
            each.overrides,
            str(scores / f"{each.arm}-{seed}.npy"),
            f"datasets/objectives/{name}/test.parquet" if name in REAL else None,
        )
        for seed in range(1, seeds + 1)
        for each in chosen
    ]


def spread(jobs: Mapping[str, Sequence[Job]]) -> list[Job]:
    """Jobs of several sets in turns, in proportion, so that all sets end at about the same time."""
    placed = [
        (at / len(of_set), number, job) for number, of_set in enumerate(jobs.values()) for at, job in enumerate(of_set)
    ]
    return [job for _, _, job in sorted(placed, key=lambda each: each[:2])]


def search(sets: Sequence[str], folder: Path, *, processes: int, limit_s: float) -> None:
    """Trains on the training rows and keeps NE on the validation rows."""
    run_all(
        spread({name: search_jobs(name) for name in dict.fromkeys(map(searched, sets))}),
        folder / "search.jsonl",
        processes=processes,
        limit_s=limit_s,
    )


def measure(
    sets: Sequence[str], folder: Path, *, processes: int, limit_s: float, seeds: int, arms: Sequence[str]
) -> None:
    """Trains the best of each arm, or of those named, and keeps logits of the test rows."""
    found = read_results(folder / "search.jsonl")
    chosen = {name: only(choose(found, name), arms) for name in sets}
    jobs = {name: final_jobs(name, of_set, seeds, folder) for name, of_set in chosen.items()}
    run_all(spread(jobs), folder / "test.jsonl", processes=processes, limit_s=limit_s)


def moved(result: Result, folder: Path) -> Result:
    """With the scores where they are now: they may have been written on another machine."""
    assert result.job.scores is not None
    path = folder / "scores" / result.job.group / Path(result.job.scores).name
    return replace(result, job=replace(result.job, scores=str(path)))


def main() -> None:
    """Runs a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("search", "test", "report"))
    parser.add_argument("sets", nargs="*", help=f"of {', '.join(SETS)}; none: the real ones")
    parser.add_argument("--runs", type=Path, default=Path("runs/objectives"), help="where runs are kept")
    parser.add_argument("--seeds", type=int, default=5, help="test: 2 or more, one seed has no interval")
    parser.add_argument("--arms", nargs="+", default=[], help="test, report: these alone, with more seeds, say")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="no run starts that would end later")
    parser.add_argument("--out", type=Path, default=Path("docs/results/ne-gap"), help="report: without ending")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="report: JSON of other machines' reports")
    parser.add_argument("--measured", default="", help="report: when, where and of which commit")
    arguments = parser.parse_args()
    if unknown := set(arguments.sets) - set(SETS):
        parser.error(f"no such set: {', '.join(sorted(unknown))}; there are {', '.join(SETS)}")
    if arguments.seeds < 2:
        parser.error("--seeds: an interval needs 2 or more")
    sets = [name for name in SETS if name in (arguments.sets or REAL)]
    limits = {"processes": arguments.jobs, "limit_s": arguments.limit_s}
    if arguments.stage == "search":
        search(sets, arguments.runs, **limits)
    elif arguments.stage == "test":
        measure(sets, arguments.runs, **limits, seeds=arguments.seeds, arms=arguments.arms)
    else:
        from objectives_page import write_report

        found = read_results(arguments.runs / "search.jsonl")
        tested = [moved(result, arguments.runs) for result in read_results(arguments.runs / "test.jsonl")]
        there = {each.job.group for each in found}
        chosen = {name: only(choose(found, name), arguments.arms) for name in sets if searched(name) in there}
        more = [row for file in arguments.more for row in json.loads(file.read_text(encoding="utf-8"))]
        write_report(chosen, tested, arguments.out, more=more, measured=arguments.measured)


if __name__ == "__main__":
    main()

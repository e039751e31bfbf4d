"""What the arms of a report come to: means with intervals, and paired differences to the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from erase_rec.errors import UserError, nearest
from eval.arms import differences, shortened
from eval.report.paper import PaperRow, paper_row
from eval.report.records import Collected, Missing, RunRecord
from eval.report.turns import Turns, read_turns
from eval.statistics import Interval, t_interval

_Key = TypeVar("_Key")

SeedRuns = dict[tuple[int, int], RunRecord]
"""Runs of an arm by seed, and number of the launch with that seed."""


@dataclass(frozen=True)
class Difference:
    """An arm against the baseline, over pairs of the same seed and launch, or of turns side by side.

    Attributes:
        pct: mean of the pairs' differences in per cent of the baseline's value, with Student's interval.
        pairs: how many.
        verdict: ``higher``, ``lower``, ``inside the noise`` or ``one pair: no verdict``.
    """

    pct: Interval
    pairs: int
    verdict: str


@dataclass(frozen=True)
class ArmResult:
    """A line of the report's table.

    Attributes:
        name: of the arm.
        seeds: its seeds.
        runs: how many runs.
        is_baseline: whether the others are compared with it.
        is_twin: whether its configuration is the baseline's, which makes the two an A/A pair.
        paper: the row of the paper that it stands for.
        qps_p90: rows a second, mean over runs or turns; None: not measured.
        gain: QPS p90 against the baseline; None for it and where it cannot be told.
        ne: held-out NE, mean over seeds; None: not evaluated.
        ne_gap: NE against the baseline; below 0 the arm is better.
        auc: held-out AUC, mean over runs.
        accuracy: held-out accuracy at 0.5, likewise.
        step_ms: median time of a step, mean over runs; None where QPS is not from the runs.
        backward_ms: time of a step in which a backward ran, median over logged steps, mean over runs.
        backward_gap: that against the baseline.
        towers: held-out NE of the towers' local logits, means over seeds.
        peak_memory_gib: most over runs; nan: not known.
        audit: verdict of the start-up audits.
    """

    name: str
    seeds: tuple[int, ...]
    runs: int
    is_baseline: bool
    is_twin: bool
    paper: PaperRow | None
    qps_p90: Interval | None
    gain: Difference | None
    ne: Interval | None
    ne_gap: Difference | None
    auc: Interval | None
    accuracy: Interval | None
    step_ms: Interval | None
    backward_ms: Interval | None
    backward_gap: Difference | None
    towers: Mapping[str, float]
    peak_memory_gib: float
    audit: str


@dataclass(frozen=True)
class Report:
    """All that a report says, figures aside.

    Attributes:
        arms: the baseline first.
        by_arm: the runs of each.
        speeds: of each, QPS p90 of its runs, or of its turns where those were given.
        turns: what QPS is from, where it is not from the runs.
        missing: runs that are not counted.
        remarks: what stands in the way of comparing, one sentence each.
        environment: machine, versions and commits: the distinct values that the runs recorded.
        commands: that made the runs.
    """

    arms: tuple[ArmResult, ...]
    by_arm: Mapping[str, SeedRuns]
    speeds: Mapping[str, Sequence[float]]
    turns: Turns | None
    missing: tuple[Missing, ...]
    remarks: tuple[str, ...]
    environment: Mapping[str, tuple[str, ...]]
    commands: tuple[str, ...]

    @property
    def baseline(self) -> ArmResult:
        """The arm that the others are compared with."""
        return self.arms[0]

    @property
    def twin(self) -> ArmResult | None:
        """The baseline's other half of an A/A pair."""
        return next((arm for arm in self.arms if arm.is_twin), None)


def analyse(collected: Collected, baseline: str | None, bench: Path | None = None) -> Report:
    """Groups runs to arms and compares each with the baseline.

    Args:
        collected: at least one run.
        baseline: name of the arm; None: the one called ``baseline``, else of preset ``exact``, else the first.
        bench: file of ``erase-rec bench`` that QPS is taken from, by the arms' names; None: from the runs.

    Raises:
        UserError: no run came to its end, there is no such arm, or the file is not as it must be.
    """
    if not collected.runs:
        reasons = "; ".join(f"{entry.path}: {entry.reason}" for entry in collected.missing[:3])
        raise UserError(f"no run came to its end, so there is nothing to report ({reasons})")
    by_arm = group(collected.runs)
    base = _choose_baseline(by_arm, baseline)
    names = [base, *(name for name in by_arm if name != base)]
    turns = None if bench is None else read_turns(bench, _global_batch(collected.runs))
    timed = {name: _speeds(name, base, by_arm, turns) for name in names}
    arms = [_result(name, base, by_arm, timed, own_times=turns is None) for name in names]
    twin = next((arm for arm in arms if arm.is_twin), None)
    own_commands = tuple(
        dict.fromkeys(run.environment["command"] for run in collected.runs if "command" in run.environment)
    )
    return Report(
        arms=tuple(_against_twin(arm, twin) for arm in arms),
        by_arm={name: by_arm[name] for name in names},
        speeds={name: tuple(found.values()) for name, found in timed.items()},
        turns=turns,
        missing=collected.missing,
        remarks=(*_remarks(by_arm, base), *(_turn_remarks(names, timed, turns) if turns else ())),
        environment=_environment(collected.runs)
        | {key: (value,) for key, value in (turns.about if turns else {}).items()},
        commands=(*(collected.commands or own_commands), *([turns.command] if turns else [])),
    )


def _global_batch(runs: Sequence[RunRecord]) -> int:
    """Rows of a step of the runs.

    Raises:
        UserError: not all have the same.
    """
    sizes = sorted({run.summary.throughput.global_batch_size for run in runs})
    if len(sizes) > 1:
        raise UserError(
            f"--bench: the runs' global batch sizes differ ({', '.join(map(str, sizes))}); report those of one size"
        )
    return sizes[0]


def group(runs: Sequence[RunRecord]) -> dict[str, SeedRuns]:
    """Runs by arm: by its name in a sweep, else by preset and by what else differs."""
    kinds: list[tuple[RunRecord, list[RunRecord]]] = []
    for run in runs:
        for first, members in kinds:
            if (first.arm, first.keys) == (run.arm, run.keys):
                members.append(run)
                break
        else:
            kinds.append((run, [run]))
    arms: dict[str, SeedRuns] = {}
    for first, members in kinds:
        same = next(other for other, _ in kinds if (other.arm, other.preset) == (first.arm, first.preset))
        name = first.arm or first.preset
        if same is not first:
            name = f"{name} ({shortened(differences(same.keys, first.keys))})"
        if name in arms:  # they differ in keys that the name has no place for
            name = f"{name}, kind {len(arms)}"
        arms[name] = _by_launch(members)
    return arms


def _by_launch(runs: Sequence[RunRecord]) -> SeedRuns:
    arm: SeedRuns = {}
    for run in runs:
        launch = sum(seed == run.seed for seed, _ in arm)
        arm[run.seed, launch] = run
    return arm


def _choose_baseline(by_arm: Mapping[str, SeedRuns], wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in by_arm:
            hint = nearest(wanted, list(by_arm))
            raise UserError(f"--baseline: there is no arm {wanted}{hint}; the arms are {', '.join(by_arm)}")
        return wanted
    if "baseline" in by_arm:
        return "baseline"
    exact = (name for name, arm in by_arm.items() if next(iter(arm.values())).preset == "exact")
    return next(exact, next(iter(by_arm)))


_Timed = Mapping[str, Mapping[tuple[int, int], float]]
"""QPS p90 of each arm, by what pairs: seed and launch, or turn."""


def _speeds(
    name: str, base: str, by_arm: Mapping[str, SeedRuns], turns: Turns | None
) -> Mapping[tuple[int, int], float]:
    if turns is None:
        return speeds(by_arm[name])
    twin_of = base if name != base and _is_same(by_arm[name], by_arm[base]) else None
    return {(0, turn): qps for turn, qps in turns.of(name, is_twin_of=twin_of).items()}


def _is_same(arm: SeedRuns, base: SeedRuns) -> bool:
    return next(iter(arm.values())).keys == next(iter(base.values())).keys


def _result(name: str, base_name: str, by_arm: Mapping[str, SeedRuns], timed: _Timed, *, own_times: bool) -> ArmResult:
    is_baseline, arm, base = name == base_name, by_arm[name], by_arm[base_name]
    runs = list(arm.values())
    peaks = [run.peak_memory_gib for run in runs if not math.isnan(run.peak_memory_gib)]
    return ArmResult(
        name=name,
        seeds=tuple(sorted({seed for seed, _ in arm})),
        runs=len(runs),
        is_baseline=is_baseline,
        is_twin=not is_baseline and _is_same(arm, base),
        paper=paper_row(name, runs[0].preset, is_baseline=is_baseline),
        qps_p90=_mean(list(timed[name].values())),
        gain=None if is_baseline else difference(timed[name], timed[base_name]),
        ne=_mean(list(entropies(arm).values())),
        ne_gap=None if is_baseline else difference(entropies(arm), _of_same_data(arm, base)),
        auc=_mean([run.summary.eval.auc for run in runs]),
        accuracy=_mean([_accuracy(run) for run in runs]),
        step_ms=_mean([run.step_ms for run in runs]) if own_times else None,
        backward_ms=_mean(list(_backwards(arm).values())),
        backward_gap=None if is_baseline else difference(_backwards(arm), _backwards(base)),
        towers=_towers(runs),
        peak_memory_gib=max(peaks, default=math.nan),
        audit=_audit(runs),
    )


def speeds(arm: SeedRuns) -> dict[tuple[int, int], float]:
    """QPS p90 by seed and launch, where it was measured."""
    found = {key: run.summary.throughput.qps_p90 for key, run in arm.items()}
    return {key: qps for key, qps in found.items() if math.isfinite(qps)}


def _backwards(arm: SeedRuns) -> dict[tuple[int, int], float]:
    """Milliseconds of a step in which a backward ran, by seed and launch: medians over the logged steps.

    The first is left out where there are more: it warms up, and on a GPU it may not be captured yet.
    """
    found = {}
    for key, run in arm.items():
        logged = [value for window in run.windows if (value := window.get("time/backward_ms")) is not None]
        if logged:
            found[key] = float(np.median(logged[1:] or logged))
    return found


def _accuracy(run: RunRecord) -> float:
    return float((run.summary.eval.model_extra or {}).get("accuracy", math.nan))


def entropies(arm: SeedRuns) -> dict[int, float]:
    """Held-out NE by seed, where it is defined: the mean over launches, which differ by rounding at most."""
    seeds = {seed for seed, _ in arm}
    found = {seed: [run.summary.eval.ne for (own, _), run in arm.items() if own == seed] for seed in sorted(seeds)}
    means = {seed: float(np.mean(values)) for seed, values in found.items()}
    return {seed: ne for seed, ne in means.items() if math.isfinite(ne)}


def _of_same_data(arm: SeedRuns, base: SeedRuns) -> dict[int, float]:
    """The baseline's NE of seeds whose data are the arm's."""
    prints = {seed: run.summary.data.fingerprint for (seed, _), run in arm.items()}
    same = {key: run for key, run in base.items() if prints.get(key[0]) == run.summary.data.fingerprint}
    return entropies(same)


def difference(arm: Mapping[_Key, float], base: Mapping[_Key, float]) -> Difference | None:
    """The paired difference in per cent; None where nothing pairs."""
    pairs = [100 * (value / base[key] - 1) for key, value in arm.items() if key in base]
    if not pairs:
        return None
    pct = t_interval(np.array(pairs))
    if math.isnan(pct.low):
        return Difference(pct, 1, "one pair: no verdict")
    if not pct.excludes_zero:
        return Difference(pct, len(pairs), "inside the noise")
    return Difference(pct, len(pairs), "higher" if pct.mid > 0 else "lower")


def _against_twin(arm: ArmResult, twin: ArmResult | None) -> ArmResult:
    """A difference no larger than the one within the A/A pair is noise, whatever its interval says."""
    if twin is None or arm.is_baseline or arm.is_twin:
        return arm

    def judged(own: Difference | None, noise: Difference | None) -> Difference | None:
        if own is None or noise is None or own.pairs < 2 or abs(own.pct.mid) > abs(noise.pct.mid):
            return own
        return replace(own, verdict="inside the noise")

    return replace(arm, gain=judged(arm.gain, twin.gain), ne_gap=judged(arm.ne_gap, twin.ne_gap))


def _mean(values: Sequence[float]) -> Interval | None:
    finite = [value for value in values if math.isfinite(value)]
    return t_interval(np.array(finite)) if finite else None


def _towers(runs: Sequence[RunRecord]) -> dict[str, float]:
    names = dict.fromkeys(name for run in runs for name in run.summary.towers)
    values = {name: [run.summary.towers[name].ne for run in runs if name in run.summary.towers] for name in names}
    return {name: float(np.mean(of_tower)) for name, of_tower in values.items() if np.isfinite(of_tower).all()}


def _audit(runs: Sequence[RunRecord]) -> str:
    found = [run.audit or "not recorded" for run in runs]
    kinds = {verdict: found.count(verdict) for verdict in found}
    if len(kinds) == 1:
        return found[0]
    return ", ".join(f"{verdict} ({number} of {len(runs)})" for verdict, number in kinds.items())


_MACHINE = ("gpu", "platform", "torch", "cuda", "fbgemm", "torchrec", "python", "erase_rec", "git_commit")


def _environment(runs: Sequence[RunRecord]) -> dict[str, tuple[str, ...]]:
    values = {
        key: tuple(dict.fromkeys(run.environment[key] for run in runs if key in run.environment)) for key in _MACHINE
    }
    sizes = {
        "ranks": [str(run.summary.throughput.ranks) for run in runs],
        "global batch": [f"{run.summary.throughput.global_batch_size:,} rows" for run in runs],
        "precision": [str(run.keys.get("train.precision", "fp32")) for run in runs],
        "data fingerprint": [run.summary.data.fingerprint[:12] for run in runs],
    }
    known = {key: found or ("not recorded",) for key, found in values.items()}
    return known | {key: tuple(dict.fromkeys(found)) for key, found in sizes.items()}


def _turn_remarks(names: Sequence[str], timed: _Timed, turns: Turns) -> list[str]:
    """Arms without turns, and why."""
    return [
        f"{name} has no QPS: {turns.refused.get(name, 'it is no arm')} ({turns.path})."
        for name in names
        if not timed[name]
    ]


def _remarks(by_arm: Mapping[str, SeedRuns], base: str) -> list[str]:
    """What stands in the way of comparing."""
    remarks = []
    runs = [run for arm in by_arm.values() for run in arm.values()]
    for key, of_what in (("gpu", "devices"), ("platform", "platforms"), ("torch", "versions of torch")):
        found = {run.environment[key] for run in runs if key in run.environment}
        if len(found) > 1:
            remarks.append(f"The runs are of {len(found)} {of_what}, so their QPS cannot be compared.")
    commits = {run.environment["git_commit"] for run in runs if "git_commit" in run.environment}
    if len(commits) > 1:
        remarks.append(f"The runs are of {len(commits)} commits of the code.")
    if len({run.summary.throughput.global_batch_size for run in runs}) > 1:
        remarks.append("The arms' global batch sizes differ, and with them what a step is.")
    for name, arm in by_arm.items():
        ours, theirs = entropies(arm), entropies(by_arm[base])
        unlike = [seed for seed in ours if seed in theirs and seed not in _of_same_data(arm, by_arm[base])]
        if name != base and unlike:
            seeds = ", ".join(map(str, unlike))
            remarks.append(f"{name}: the data of seed {seeds} are not the baseline's, so its NE is not compared there.")
        alone = sorted({seed for seed, _ in arm} ^ {seed for seed, _ in by_arm[base]})
        if name != base and alone:
            remarks.append(
                f"{name}: seed {', '.join(map(str, alone))} is on one side only and is left out of the differences."
            )
    return remarks

"""Reads runs for the report from their folders alone: neither their code nor their data is needed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from erase_rec.dashboards import PEAK_MEMORY
from erase_rec.errors import UserError
from erase_rec.run_folder import RunFolder
from erase_rec.run_log import EVENT_PREFIX, METRICS_FILE
from erase_rec.step_timeline import StepTimeline
from erase_rec.summary import SUMMARY_FILE, Summary
from erase_rec.sweep.record import SWEEP_FILE, SweepRecord
from eval.arms import flat

ASIDE = ("seed", "run")
"""Sections that do not make another arm."""
_VERDICT = re.compile(r"^audit (passed|failed: \d+ findings?)", re.MULTILINE)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DAMAGED_FORMAT = (yaml.YAMLError, DecodeError)


@dataclass(frozen=True)
class RunRecord:
    """A run that came to its end.

    Attributes:
        path: its folder.
        arm: name of its arm in a sweep; None: it is of no sweep.
        seed: of the run.
        keys: the configuration, flat, without what does not make another arm, and the number of ranks.
        summary: what it came to.
        windows: rows of the metrics file.
        environment: machine, versions, commit and command.
        audit: verdict of the start-up audit; None: not recorded.
        peak_memory_gib: most device memory held, nan where it is not known.
        timeline: one late step, as measured; None: not kept.
    """

    path: Path
    arm: str | None
    seed: int
    keys: Mapping[str, Any]
    summary: Summary
    windows: Sequence[Mapping[str, float | None]]
    environment: Mapping[str, str]
    audit: str | None
    peak_memory_gib: float
    timeline: StepTimeline | None

    @property
    def preset(self) -> str:
        """``schedule.preset``."""
        return str(self.keys.get("schedule.preset", "exact"))

    @property
    def step_ms(self) -> float:
        """Median time of a step; nan where it was not measured."""
        throughput = self.summary.throughput
        return 1e3 * throughput.global_batch_size / throughput.qps_p50 if throughput.qps_p50 else math.nan


@dataclass(frozen=True)
class Missing:
    """A run that is not counted, and why."""

    path: Path
    arm: str
    seed: int | None
    reason: str


@dataclass(frozen=True)
class Collected:
    """What lies in the folders.

    Attributes:
        runs: those that came to their end.
        missing: the others.
        commands: of the sweeps.
    """

    runs: tuple[RunRecord, ...]
    missing: tuple[Missing, ...]
    commands: tuple[str, ...]


def collect(paths: Iterable[Path]) -> Collected:
    """Reads run folders, sweeps, and folders of either; a run that is named twice counts once.

    Raises:
        UserError: a folder holds no run, or a file in it is broken.
    """
    runs: dict[Path, RunRecord] = {}
    missing: dict[Path, Missing] = {}
    commands: list[str] = []
    for folder in (found for path in paths for found in _folders(path)):
        sweep = SweepRecord.read(folder)
        points = [(folder, None, None, None)] if sweep is None else _points(folder, sweep)
        if sweep is not None:
            commands.append(sweep.command)
        for path, arm, seed, reason in points:
            read = _read(path, arm, seed, reason)
            if isinstance(read, RunRecord):
                runs.setdefault(path.resolve(), read)
            else:
                missing.setdefault(path.resolve(), read)
    return Collected(
        tuple(runs.values()),
        tuple(entry for path, entry in missing.items() if path not in runs),
        tuple(dict.fromkeys(commands)),
    )


def _folders(path: Path) -> list[Path]:
    """``path`` where it is a run or a sweep, else the runs and sweeps in it."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; name run folders, a sweep's folder, or a folder of either")
    if _holds_runs(path):
        return [path]
    inside = sorted(child for child in path.iterdir() if child.is_dir() and _holds_runs(child))
    if not inside:
        raise UserError(f"{path} holds no run: neither it nor a folder in it has a config.yaml or a {SWEEP_FILE}")
    return inside


def _holds_runs(path: Path) -> bool:
    return RunFolder(path).config.is_file() or (path / SWEEP_FILE).is_file()


_Point = tuple[Path, str | None, int | None, str | None]
"""Folder, arm, seed, and why it failed."""


def _points(folder: Path, sweep: SweepRecord) -> list[_Point]:
    reasons = {"failed": "failed", "pending": "not started", "running": "still running, or killed"}
    return [
        (folder / point.folder, point.arm, point.seed, point.reason or reasons.get(point.status))
        for point in sweep.points
    ]


def _read(path: Path, arm: str | None, seed: int | None, reason: str | None) -> RunRecord | Missing:
    folder = RunFolder(path)
    if reason is not None or not folder.config.is_file():
        return Missing(path, arm or "", seed, reason or "its folder is gone")
    with _reading(folder.config):
        keys = _configuration(folder.config)
        own_seed = int(keys.pop("seed", 0)) if seed is None else seed
    keys = {key: value for key, value in keys.items() if key.split(".")[0] not in ASIDE}
    arm_or_preset = arm or str(keys.get("schedule.preset", ""))
    if not (path / SUMMARY_FILE).is_file():
        return Missing(path, arm_or_preset, own_seed, f"it has no {SUMMARY_FILE}: still running, or killed")
    summary = Summary.read(path)
    if summary.status not in {"completed", "stopped_early"}:
        return Missing(path, arm_or_preset, own_seed, f"it was {summary.status} after {summary.train.steps:,} steps")
    keys["ranks"] = summary.throughput.ranks
    audit, peak = _from_events(path)
    environment = folder.read_environment() if folder.environment.is_file() else {}
    with _reading(path / METRICS_FILE):
        windows = tuple(_windows(path))
    timeline = StepTimeline.read(path)
    return RunRecord(path, arm, own_seed, keys, summary, windows, environment, audit, peak, timeline)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what is wrong with a file of a run into a user's error."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, *_DAMAGED_FORMAT) as error:
        raise UserError(
            f"{path}: is not as a run leaves it ({type(error).__name__}: {error}); mend it, or leave the run out"
        ) from error


def _configuration(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    # Runs are many and their files long, so they are read with libyaml. It has no bound on what aliases stand for; a
    # run writes none.
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _LOADER)):
        raise UserError(f"{path}: holds an alias (*name), which no run writes; leave the run out")
    document = yaml.load(text, _LOADER)
    if not isinstance(document, dict):
        raise UserError(f"{path}: expected a mapping, found {type(document).__name__}")
    return dict(flat(document))


def _windows(path: Path) -> Iterator[dict[str, float | None]]:
    file = path / METRICS_FILE
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else ():
        if line.endswith("\n"):  # a kill can cut the last one short
            window = json.loads(line)
            if not isinstance(window, dict) or not all(_is_value(value) for value in window.values()):
                raise ValueError(f"expected numbers by tag, found {line[:80]!r}")
            yield window


def _is_value(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _from_events(path: Path) -> tuple[str | None, float]:
    """The audit's verdict, and the peak memory: the last ones logged."""
    audit, peak = None, math.nan
    for file in sorted(path.glob(f"{EVENT_PREFIX}*")):
        with _reading(file):
            for event in LegacyEventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    if value.tag == PEAK_MEMORY:
                        peak = value.simple_value
                    elif value.tag == "audit" and (found := _VERDICT.search(value.tensor.string_val[0].decode())):
                        audit = found[1]
    return audit, peak

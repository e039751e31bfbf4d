"""Every measurement on several GPUs as one command: correctness, a rank that fails, step times, scaling.

    python benchmarks/several_gpus.py --out results --gpus 2 --quick

Each part is a program of its own under torchrun, with a limit of time: what fails or hangs is recorded and stops no
other part. ``several_gpus.json`` is written after each part, ``several_gpus.md`` at the end, both into ``--out``.

- ``check``: every legal way to launch and to reduce, held to one process (ranks/check.py). NCCL checks that no two
  threads race for a device.
- ``kill``, ``stop``: the last rank is killed or stopped; how long the others live on, and whom they name.
- ``speed xN``: ``erase-rec bench`` on N ranks with the arms of configs/bench/arms_several_gpus.yaml.
- ``scaling``: from the speeds of 1, 2, 4 ... N ranks.
- ``expected``: ``--again FILE`` measures nothing, and adds to earlier results what ``erase-rec plan`` expects of the
  same steps; on any machine, so that it costs no time on the GPUs.

The first two kinds need no quiet device and run side by side.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from erase_rec.api.assembly import ContentCatalog
from erase_rec.capacity.cluster import Cluster
from erase_rec.cli.main import run
from erase_rec.cli.plan_workshop import plan_capacity
from erase_rec.config.load import load_config
from erase_rec.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[1]
RANKS = CHECKOUT / "benchmarks" / "ranks"
TAIL = 4000
"""Characters of a part's output that are kept where it failed."""
POLL_S = 0.2
GRACE_S = 15.0
"""Time beyond ``distributed.timeout_s`` in which ranks notice and say what they met."""
TIMEOUT_S = 20.0
"""``distributed.timeout_s`` of the parts in which a rank fails."""
REFERENCE = "exact_streams_graph"
"""The strongest exact rival."""
SCALED_ARMS = (REFERENCE, "early_graph_joint")
WORKLOAD = "bench/several_gpus.yaml"
RACE_CHECK = {"NCCL_LAUNCH_RACE_FATAL": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
"""NCCL from 2.26 on ends a program whose threads race to launch on one device, where it keeps their order at all."""


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        ranks: processes, one a GPU.
        check: arguments of ranks/check.py.
        arms: of the speeds on all ranks; none: all of the file.
        scaled: arms of the speeds on fewer ranks.
        batches: rows of a step on one rank.
        turns: arguments of ``erase-rec bench``.
        overrides: of every part.
        speed_overrides: of the speeds.
        fails: ways in which the last rank fails.
        check_s: limit of the parts without speeds.
        speed_s: limit of each number of ranks.
    """

    ranks: int
    check: Sequence[str]
    arms: Sequence[str]
    scaled: Sequence[str]
    batches: Sequence[int]
    turns: Sequence[str]
    overrides: Sequence[str]
    speed_overrides: Sequence[str]
    fails: Sequence[str]
    check_s: float
    speed_s: float

    @classmethod
    def of(cls, ranks: int, *, on_cpu: bool, quick: bool) -> Plan:
        """On GPUs the whole measurement or one of three minutes; on the CPU one that only tries the program."""
        threads = ["train.device=cpu", "train.threads=1", "embedding.backend=torch"]
        if on_cpu:
            tiny = ["features.sparse=[C1, C2]", "features.sparse_defaults.num_embeddings=50", "embedding.dim=4"]
            check = ["--steps", "3", "--rows", "16", "--only", "detached, blocking"]
            turns = ["--repeats", "5", "--steps", "1", "--warmup", "1"]
            arms = ["exact_ddp", "early_graph_ddp"]
            return cls(ranks, check, arms, arms[:1], [8, 16], turns, threads, tiny, ["kill"], 240, 240)
        # 2048 beside the round numbers: so 4096 rows in all are there on one rank and on two.
        batches = [512, 1024, 2048, 4096]
        if quick:
            check = ["--steps", "100"]
            turns = ["--repeats", "6", "--steps", "25", "--warmup", "10"]
            return cls(ranks, check, QUICK_ARMS, SCALED_ARMS, batches, turns, [], [], ["kill"], 70, 70)
        turns = ["--repeats", "12", "--steps", "50", "--warmup", "20"]
        return cls(ranks, ["--steps", "300"], [], SCALED_ARMS, batches, turns, [], [], ["kill", "stop"], 300, 400)

    def fewer_ranks(self) -> list[int]:
        """1, 2, 4 ... below the number of ranks."""
        return [2**power for power in range(16) if 2**power < self.ranks]


QUICK_ARMS = (
    "exact_ddp",
    "exact_graph",
    "exact_streams_graph",
    "detached_streams_graph",
    "early_graph_joint",
    "early_graph_spread",
    "early_graph_ddp",
)


@dataclass
class Part:
    """A program under torchrun, and what became of it.

    Attributes:
        name: of the part.
        seconds: that it took.
        exit_code: of torchrun; None: it was ended at its limit.
        found: what it measured, as far as it came.
        problem: the end of its output where it failed.
    """

    name: str
    seconds: float = 0.0
    exit_code: int | None = None
    found: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """The command of ``ranks`` processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *arguments]


class Started:
    """A program in a session of its own, so that all its processes can be ended together."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log, self._start = log, time.monotonic()
        paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        given = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=CHECKOUT, env=given, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, limit_s: float) -> int | None:
        """Its exit code; None: it was ended after ``limit_s`` seconds."""
        try:
            return self._process.wait(max(0.0, limit_s - (time.monotonic() - self._start)))
        except subprocess.TimeoutExpired:
            self.end()
            return None

    def end(self) -> None:
        """Kills all of its processes: torchrun puts each rank into a session of its own."""
        ranks = psutil.Process(self._process.pid).children(recursive=True) if self.runs() else []
        for process in ranks:
            process.kill()
        self._process.kill()
        self._process.wait()

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def tail(self) -> str:
        """The end of what it printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-TAIL:]

    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._start


def check(plan: Plan, folder: Path) -> Part:
    """Every legal way held to one process."""
    out, part = folder / "check.json", Part("check")
    command = torchrun(plan.ranks, str(RANKS / "check.py"), "--out", str(out), *plan.check, *plan.overrides)
    _finish(part, Started(command, folder / "check.log", RACE_CHECK), plan.check_s, out)
    tried = part.found.get("ways", [])
    missing = part.found.get("planned", 1) - len(tried)
    part.found["passed"] = sum(way["problem"] is None for way in tried)
    part.found["failed"] = len(tried) - part.found["passed"] + missing
    if part.found["failed"]:
        part.problem = part.problem or f"{part.found['failed']} ways did not pass"
    return part


def fail(plan: Plan, how: str, folder: Path) -> Part:
    """One rank fails; how long the others live on, and whether the rank is named."""
    part, marks = Part(how), folder / how
    marks.mkdir()
    arguments = ["--how", how, "--folder", str(marks), f"distributed.timeout_s={TIMEOUT_S:g}", *plan.overrides]
    started = Started(torchrun(plan.ranks, str(RANKS / "failing.py"), *arguments), folder / f"{how}.log")
    if _wait(lambda: (marks / "failed").exists() or not started.runs(), plan.check_s) and started.runs():
        failed_at = time.monotonic()
        others = [int((marks / f"rank-{rank}").read_text()) for rank in range(plan.ranks - 1)]
        ended = _wait(lambda: not any(map(_lives, others)), TIMEOUT_S + GRACE_S)
        part.found = {"others_ended": ended, "others_lived_s": time.monotonic() - failed_at}
        # torchrun says which rank it was once that has ended; a stopped one ends by force alone.
        part.exit_code = started.wait(started.seconds() + (GRACE_S if how == "kill" else 0.0))
    started.end()
    part.seconds = started.seconds()
    last, said = plan.ranks - 1, started.tail()
    part.found["named"] = re.search(rf"rank\s*:?\s*{last}\b", said) is not None
    part.found["said"] = [line for line in said.splitlines() if line.startswith("error:")]
    if not (part.found.get("others_ended") and part.found["named"]):
        part.problem = f"{said}\nthe others lived on, or the rank is not named"
    return part


def speed(plan: Plan, ranks: int, folder: Path) -> Part:
    """Step times on so many ranks."""
    arms, out = plan.arms if ranks == plan.ranks else plan.scaled, folder / f"x{ranks}.json"
    command = torchrun(
        ranks,
        *("-m", "erase_rec", "bench", "--config", WORKLOAD),
        *("--arms-file", str(CHECKOUT / "configs" / "bench" / "arms_several_gpus.yaml"), "--arms", ",".join(arms)),
        *("--batch", ",".join(map(str, plan.batches)), *plan.turns, "--out", str(out)),
        *(*plan.overrides, *plan.speed_overrides),
    )
    part = Part(f"speed x{ranks}")
    _finish(part, Started(command, folder / f"x{ranks}.log"), plan.speed_s, out)
    return part


def scaling(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Efficiency of each arm on several ranks: weak, at as many rows a rank, and strong, at as many rows in all.

    1 means that a step takes as long as on one rank (weak), or as small a share of its time as of its rows (strong).
    """
    times = {
        (row["arm"], row["ranks"], row["batch"]): row["step_ms_p50"]
        for part in parts
        for row in part.found.get("rows", [])
        if row["step_ms_p50"] is not None and row["repeats"] is None
    }
    found = []
    for (arm, ranks, batch), step_ms in sorted(times.items()):
        weak, strong = times.get((arm, 1, batch)), times.get((arm, 1, batch * ranks))
        if ranks > 1 and (weak or strong):
            found.append(
                {
                    "arm": arm,
                    "ranks": ranks,
                    "batch": batch,
                    "step_ms": step_ms,
                    "weak": weak and weak / step_ms,
                    "strong": strong and strong / (ranks * step_ms),
                }
            )
    return found


def expected(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Steps of the scaled arms as ``erase-rec plan`` expects them, beside the measured ones; in milliseconds."""
    found = []
    for row in (row for part in parts for row in part.found.get("rows", [])):
        if row["arm"] not in SCALED_ARMS or row["repeats"] is not None or row["step_ms_p50"] is None:
            continue
        overrides = [*row["overrides"], f"train.local_batch_size={row['batch']}"]
        config = load_config(WORKLOAD, overrides, catalog=ContentCatalog()).config
        time = plan_capacity(config, Cluster(row["ranks"]), reserve_gib=0, rows_per_day=None).time
        found.append(
            {key: row[key] for key in ("arm", "ranks", "batch")}
            | {"measured_ms": row["step_ms_p50"], "expected_ms": time.step_ms, "nothing_hidden_ms": time.longest_ms}
            | {"measured_exposed_ms": row["exposed_ms"], "expected_exposed_ms": time.step_ms - time.compute_ms}
        )
    return found


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results; made where it is not there.")],
    gpus: Annotated[int, typer.Option(min=2, help="Ranks, one a GPU.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Three minutes on two GPUs.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Try the program on CPU ranks, with tiny sizes.")] = False,
    only: Annotated[str, typer.Option(help="Comma-separated parts: check, fail, speed.")] = "check,fail,speed",
    again: Annotated[Path | None, typer.Option(help="Results in JSON: say of their steps what plan expects.")] = None,
) -> None:
    """Measure on several GPUs of one machine."""
    if again is not None:
        return _compare(again, out)
    wanted = only.split(",")
    if unknown := sorted(set(wanted) - {"check", "fail", "speed"}):
        raise UserError(f"--only: expected some of check, fail, speed; found {', '.join(unknown)}")
    plan = Plan.of(gpus, on_cpu=cpu, quick=quick)
    out.mkdir(parents=True, exist_ok=True)
    parts: list[Part] = []
    with tempfile.TemporaryDirectory() as name:
        for part in _parts(plan, wanted, Path(name)):
            parts.append(part)
            _write(out, plan, parts)
            came_to = part.problem.strip().splitlines()[-1] if part.problem else "done"
            print(f"{part.name}: {came_to} ({part.seconds:.0f} s)", flush=True)
    text = "\n".join(page(plan, parts))
    (out / "several_gpus.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if any(part.problem for part in parts):
        raise UserError("several_gpus: not every part came to its end or passed; several_gpus.json says what happened")


def _parts(plan: Plan, wanted: Sequence[str], folder: Path) -> Iterator[Part]:
    """The parts, as they end."""
    with ThreadPoolExecutor() as pool:
        together = [pool.submit(check, plan, folder)] if "check" in wanted else []
        if "fail" in wanted:
            together += [pool.submit(fail, plan, how, folder) for how in plan.fails]
        for each in together:
            yield each.result()
    if "speed" in wanted:
        for ranks in (plan.ranks, *plan.fewer_ranks()):
            yield speed(plan, ranks, folder)


def _finish(part: Part, started: Started, limit_s: float, out: Path) -> None:
    """Waits for a program and takes over what it wrote."""
    part.exit_code = started.wait(limit_s)
    part.seconds = started.seconds()
    if out.exists():
        # The folder is gone afterwards: what names it is of no use to a reader.
        part.found = json.loads(out.read_text(encoding="utf-8").replace(f"{out.parent}/", ""))
    if part.exit_code is None:
        part.problem = f"{started.tail()}\nended at its limit of {limit_s:.0f} s"
    elif part.exit_code:
        part.problem = started.tail()


def _wait(reached: Any, limit_s: float) -> bool:
    """Waits until ``reached()``, but no longer than ``limit_s``; whether it was."""
    deadline = time.monotonic() + limit_s
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _compare(again: Path, out: Path) -> None:
    """Adds what is expected to the results of a file, and writes both into ``out``."""
    record = json.loads(again.read_text(encoding="utf-8"))
    record["expected"] = expected([Part(**part) for part in record["parts"]])
    text = "\n".join(_expected_table(record["expected"]))
    out.mkdir(parents=True, exist_ok=True)
    (out / "several_gpus.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "expected.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def _write(out: Path, plan: Plan, parts: Sequence[Part]) -> None:
    record = {"plan": asdict(plan), "parts": [asdict(part) for part in parts], "scaling": scaling(parts)}
    (out / "several_gpus.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def page(plan: Plan, parts: Sequence[Part]) -> Iterator[str]:
    """The results in Markdown."""
    yield f"# On {plan.ranks} ranks\n"
    for part in parts:
        if part.name == "check":
            yield from _check_table(part)
        elif part.name in {"kill", "stop"}:
            lived = part.found.get("others_lived_s", float("nan"))
            ends = f"the others ended after {lived:.1f} s" if part.found.get("others_ended") else "the others lived on"
            named = "named" if part.found["named"] else "not named"
            yield f"\nThe last rank by `{part.name}`: {ends} (time-out {TIMEOUT_S:.0f} s); it is {named}.\n"
        else:
            yield from _speed_table(part)
    rows = scaling(parts)
    if rows:
        yield "\n| arm | ranks | rows a rank | ms | weak efficiency | strong efficiency |\n|---|---|---|---|---|---|"
    for row in rows:
        efficiency = " | ".join("" if row[kind] is None else f"{row[kind]:.2f}" for kind in ("weak", "strong"))
        yield f"| {row['arm']} | {row['ranks']} | {row['batch']} | {row['step_ms']:.3f} | {efficiency} |"


def _check_table(part: Part) -> Iterator[str]:
    found, control = part.found, part.found.get("control", float("nan"))
    yield f"{found['passed']} ways passed, {found['failed']} did not; a rank alone is {control:.2f} away.\n"
    yield "| way | distance to one process | collectives | s | |\n|---|---|---|---|---|"
    for way in found.get("ways", []):
        distance = "" if way["error"] is None else f"{way['error']:.1e}"
        problem = (way["problem"] or "").strip().splitlines()[-1:]
        yield f"| {way['way']} | {distance} | {way['collectives']} | {way['seconds']:.1f} | {' '.join(problem)} |"


def _expected_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if rows:
        yield "\nWhat `erase-rec plan` expects of the same steps, in milliseconds:\n"
        yield "| arm | ranks | rows a rank | step | expected | | if nothing is hidden | exposed | expected |"
        yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        off = 100 * (row["expected_ms"] / row["measured_ms"] - 1)
        shown = (row[key] for key in ("measured_ms", "expected_ms"))
        bare = (row[key] for key in ("nothing_hidden_ms", "measured_exposed_ms", "expected_exposed_ms"))
        yield (
            f"| {row['arm']} | {row['ranks']} | {row['batch']} | {' | '.join(map(_shown, shown))} | {off:+.0f} % "
            f"| {' | '.join(map(_shown, bare))} |"
        )


SPEED_COLUMNS = {
    "arm": "arm",
    "batch": "rows a rank",
    "step_ms_p50": "ms",
    "qps_mean": "rows/s",
    "qps_p90": "rows/s p90",
    "collective_ms": "collectives ms",
    "exposed_ms": "exposed ms",
    "stagger_ms": "staggering ms",
    "idle_share": "idle",
    "peak_gib": "peak GiB",
}
"""Fields of a row of ``erase-rec bench`` that the page shows."""


def _speed_table(part: Part) -> Iterator[str]:
    rows = part.found.get("rows", [])
    yield f"\n{part.name}:\n"
    yield f"| {' | '.join(SPEED_COLUMNS.values())} | speed to the strongest exact [95 %] |"
    yield f"|{'---|' * (len(SPEED_COLUMNS) + 1)}"
    for row in rows:
        if row["refused"] is not None:
            yield f"| {row['arm']} | {row['batch']} | {row['refused']} |{' |' * (len(SPEED_COLUMNS) - 2)}"
            continue
        low, mid, high = row["ratio_to"].get(REFERENCE, (None, None, None))
        known = None not in {low, mid, high}
        speed = f"{mid:.3f} [{low:.3f}, {high:.3f}]" if known else "1" if row["arm"] == REFERENCE else ""
        yield f"| {' | '.join(_shown(row.get(key)) for key in SPEED_COLUMNS)} | {speed} |"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"
    return str(value)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run(app)

"""Faults of every kind in a training run on two ranks: each time it goes on, and every row is audited by its id.

    make faults                     # one of each kind, about a minute
    make faults FAULTS=50 SEED=1    # so many at random, with a log: build/faults.md

A run of a small model is started, something happens to it (see KINDS), its ranks must all end within a bound and say
what was wrong, and the same command is given again: as torchrun's restarts do, it goes on by itself from the newest
whole checkpoint. At the end each id must have been trained on once an epoch, counting a step that was trained again
from the checkpoint that it started from; the summary and every tensor of the last checkpoint must be, bit for bit,
those of a run that nobody disturbed (sums of training metrics: to 1e-12). Runs differ in how tables are spread and in
how checkpoints are written.

Ranks are processes of their own, forked from one that has loaded torch (tests/cases/warm_process.py); the part of
torchrun that tells the others when a rank has failed is played here, in every second fault, and left out in the others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cases"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import warm_process
from faults_data import lost_rows, recorded_steps
from faults_rank import FAULT, Fault

from data.features.encoding import FIRST_ROW
from erase_rec import environment
from erase_rec.checkpoint import CheckpointManager, load, read_state, stored_layout
from erase_rec.cli.main import run
from erase_rec.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[1]
RANKS = 2
ROWS, EPOCHS, STEPS = 480, 2, 24
EVAL_BATCHES = 6
"""Held-out batches of a rank in an evaluation."""
EVALUATIONS = 4
TIMEOUT_S = 120.0
"""``distributed.timeout_s`` of runs in which nobody has to wait for it ..."""
SHORT_TIMEOUT_S = 12.0
"""... and of those in which somebody has."""
END_S = 60.0
"""Ranks that share a busy machine have ended so long after that."""
PATIENCE_S = 240.0
"""A run that nothing happens to ends within this."""
ID = "row_id"
SETTINGS = (
    "data.kind=csv",
    "data.label.column=label",
    f"features.sparse=[{{name: {ID}, min_count: 1}}, C1, C2, C6]",
    "features.dense=[I1, I2, I3]",
    "towers=[{name: deep, kind: mlp, loss: {kind: bce}, params: {hidden: [16], out_dim: 8}}, "
    "{name: cross, kind: dcn_v2, loss: {kind: bce}, params: {rank: 4}}]",
    f"train.epochs={EPOCHS}",
    "train.local_batch_size=20",
    "train.threads=1",
    "train.device=cpu",
    "train.log_every_steps=5",
    "train.checkpoint_every_steps=4",
    "train.eval_every_steps=6",
    "train.keep_checkpoints=3",
    "eval.local_batch_size=10",
    "data.workers=1",
    "distributed.check_every=5",
)
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "whole tables": ("embedding={dim: 4, backend: torch}",),
    "whole tables, written beside training": ("embedding={dim: 4, backend: torch}", "train.checkpoint_async=true"),
    "spread tables": ("embedding={dim: 4, sharding: row_wise}",),
    "spread tables, written beside training": (
        "embedding={dim: 4, sharding: row_wise}",
        "train.checkpoint_async=true",
    ),
}


@dataclass
class Attempt:
    """How one start of the ranks ended.

    Attributes:
        codes: exit codes by rank.
        said: what they printed.
        ended_s: seconds from the end of the first rank, or from its fault, to that of the last.
        record: where they wrote what they trained on.
    """

    codes: list[int]
    said: str
    ended_s: float
    record: Path

    @property
    def errors(self) -> list[str]:
        """What they said was wrong."""
        return [line for line in self.said.splitlines() if line.startswith("error:")]


@dataclass
class Outcome:
    """One fault, and what came of it; ``wrong`` is empty where all is as it should be."""

    kind: str
    variant: str
    told: bool
    fault: dict[str, Any]
    codes: list[int] = field(default_factory=list)
    ended_s: float = 0.0
    said: str = ""
    resumed_from: str = ""
    wrong: list[str] = field(default_factory=list)


class Suite:
    """The folder of a series of faults: data, undisturbed runs by variant, and what each fault came to.

    Attributes:
        folder: where all of it is.
        outcomes: so far.
        whole_s: seconds of the undisturbed run, by variant.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the data, and another file for a rank whose rows differ."""
        self.folder = folder
        self.outcomes: list[Outcome] = []
        self.whole_s: dict[str, float] = {}
        self._timeout_s: dict[str, float] = {}
        self._whole: dict[str, dict[str, Any]] = {}
        options = ("--rows", str(ROWS), "--eval-rows", str(RANKS * 10 * EVAL_BATCHES), "--format", "csv", "--id-column")
        warm_process.run(folder, "-m", "erase_rec", "synth", *options, "--out", "rows")
        lines = (folder / "rows" / "train-00000.csv").read_text().splitlines(keepends=True)
        (folder / "rows" / "other-00000.csv").write_text("".join([*lines[:-2], lines[-1]]))

    def attempt(
        self,
        name: str,
        variant: str,
        fault: Fault | None = None,
        *,
        told: bool = False,
        after_s: float | None = None,
    ) -> Attempt:
        """Starts the ranks of a run, anew or on what there is of it, and waits for their end.

        Args:
            name: of the run.
            variant: of VARIANTS.
            fault: what happens; None: nothing.
            told: as torchrun does, tell the others by SIGTERM once a rank has failed.
            after_s: kill ``fault.rank`` from outside after so many seconds.
        """
        number = len(list(self.folder.glob(f"{name}.attempt-*")))
        output = self.folder / f"{name}.attempt-{number}"
        output.mkdir()
        timeout_s = self._timeout_s.get(name, TIMEOUT_S)
        files = ("data.train=rows/train-00000.csv", "data.eval=rows/eval.csv")
        files += (f"run.name={name}", f"distributed.timeout_s={timeout_s}")
        overrides = dict(each.split("=", 1) for each in (*SETTINGS, *VARIANTS[variant], *files))
        program = [str(CHECKOUT / "benchmarks" / "faults_rank.py"), str(output / "record"), ID]
        arguments = [*program, "--config", "ctr_criteo.yaml", *(f"{key}={value}" for key, value in overrides.items())]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        planted = {} if fault is None or after_s is not None else {FAULT: json.dumps(asdict(fault))}
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(
                    warm_process.started(
                        self.folder,
                        arguments,
                        output,
                        warm_process.rank_environment(rank, RANKS, store.port)
                        | planted
                        | {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": str(number)},
                    )
                )
                for rank in range(RANKS)
            ]
            if fault is not None and after_s is not None:
                time.sleep(after_s)
                ranks[fault.rank].send_signal(signal.SIGKILL)
            ended_s = _await(ranks, fault, timeout_s, told=told, said=output / "stderr")
            codes = [code for rank in ranks if (code := rank.poll()) is not None]
        assert len(codes) == RANKS
        said = "".join((output / each).read_text() for each in warm_process.OUTPUT)
        return Attempt(codes, said, ended_s, output / "record-0")

    def whole(self, variant: str) -> dict[str, Any]:
        """The result of an undisturbed run; made once."""
        if variant not in self._whole:
            name = f"whole-{list(VARIANTS).index(variant)}"
            start_s = time.monotonic()
            attempt = self.attempt(name, variant)
            self.whole_s[variant] = time.monotonic() - start_s
            if attempt.codes != [0] * RANKS:
                raise UserError(f"an undisturbed run fails: {attempt.errors or attempt.said}")
            if problems := audit([attempt.record]):
                raise UserError(f"an undisturbed run: {problems}")
            self._whole[variant] = self.result(name)
        return self._whole[variant]

    def result(self, name: str) -> dict[str, Any]:
        """The summary without its clock, and every tensor of the last checkpoint."""
        summary = json.loads((self.run_folder(name) / "summary.json").read_text())
        path = self.newest(name)
        held = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in stored_layout(path).items()}
        load(path, held)
        return {key: value for key, value in summary.items() if key != "throughput"} | held

    def run_folder(self, name: str) -> Path:
        """Where a run writes."""
        return self.folder / "runs" / name

    def newest(self, name: str) -> Path:
        """The newest whole checkpoint."""
        found, _ = CheckpointManager(self.run_folder(name) / "checkpoints", keep=1).latest()
        assert found is not None, f"{name} has no checkpoint"
        return found

    def strike(self, kind: str, variant: str, rng: random.Random, *, told: bool) -> Outcome:
        """Lets a fault of ``kind`` happen to a run, goes on, and audits."""
        whole, name = self.whole(variant), f"fault-{len(self.outcomes)}"
        if KINDS[kind] in (asleep, input_ends):
            self._timeout_s[name] = SHORT_TIMEOUT_S
        struck = KINDS[kind](self, name, variant, rng, told)
        where = asdict(struck.fault).items()
        found = Outcome(
            kind, variant, told, {key: value for key, value in where if value is not None and value is not False}
        )
        found.codes, found.ended_s = struck.attempt.codes, round(struck.attempt.ended_s, 1)
        found.said = " | ".join(struck.attempt.errors)
        found.wrong += struck.wrong
        last = self.attempt(name, variant)
        notes = [line.strip() for line in last.said.splitlines() if "resuming from" in line or "; skipped" in line]
        found.resumed_from = " | ".join(notes).replace(f"{self.folder}/", "")
        found.wrong += struck.expects(last)
        if last.codes != [0] * RANKS:
            found.wrong.append(f"does not go on: codes {last.codes}, {last.errors or last.said[-2000:]}")
        else:
            records = [struck.attempt.record, last.record]
            found.wrong += audit(records) + differences(self.result(name), whole)
        if not found.wrong:  # what is wrong stays to be looked at
            shutil.rmtree(self.run_folder(name))
        self.outcomes.append(found)
        return found


def _await(
    ranks: list[warm_process.Running], fault: Fault | None, timeout_s: float, *, told: bool, said: Path
) -> float:
    """Waits until all have ended; seconds since the first did. A rank that was stopped is killed after the others."""
    give_up_s = time.monotonic() + PATIENCE_S
    first_s: float | None = None
    stopped = fault.rank if fault is not None and fault.kind == "stop" else None
    while any(rank.poll() is None for rank in ranks):
        now = time.monotonic()
        if first_s is None and (
            any(rank.poll() is not None for rank in ranks)
            or (stopped is not None and said.exists() and "fault:" in said.read_text())
        ):
            first_s = now
            give_up_s = now + timeout_s + END_S
        if told and any(rank.poll() not in (None, 0) for rank in ranks):
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGTERM)
            told = False
        if stopped is not None and all(rank.poll() is not None for at, rank in enumerate(ranks) if at != stopped):
            ended_s = now - (first_s or now)
            ranks[stopped].send_signal(signal.SIGKILL)
            ranks[stopped].wait(END_S)
            return ended_s
        if now > give_up_s:
            raise UserError(f"ranks hang; codes {[rank.poll() for rank in ranks]}, see {said.parent}")
        time.sleep(0.02)
    return time.monotonic() - (first_s or time.monotonic())


def audit(records: list[Path]) -> list[str]:
    """What is wrong with what the starts of a run trained on: steps missing, or ids not once an epoch.

    Args:
        records: of each start, in order, what the names of its ranks' records begin with.
    """
    steps: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
    for record in records:
        of_rank = [recorded_steps(path) for path in sorted(record.parent.glob(f"{record.name}-*"))]
        begun = sorted({step for found in of_rank for step in found})
        if begun:
            # It started from a checkpoint there: what came after it before is void.
            steps = {step: ids for step, ids in steps.items() if step < begun[0]}
            steps |= {step: np.concatenate([found[step] for found in of_rank if step in found]) for step in begun}
    if not steps or sorted(steps) != list(range(len(steps))):
        return [f"steps are missing: there are {sorted(steps)}"]
    return lost_rows(steps, epochs=EPOCHS, rows=ROWS, first_row=FIRST_ROW)


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Where a result is not, bit for bit, what it should be.

    But for the sums of training metrics: a checkpoint adds up the ranks' open windows, and one that an undisturbed run
    does not write, because nobody told it to end there, lets float64 sums come in another order.
    """
    if found.keys() != expected.keys():
        return [f"other parts of the result: {sorted(found.keys() ^ expected.keys())}"]
    return [f"{key} is not that of an undisturbed run" for key in found if not _same(key, found[key], expected[key])]


def _same(key: str, found: Any, expected: Any) -> bool:
    if key.startswith("metrics/"):
        return torch.allclose(found, expected, rtol=1e-12, atol=0.0)
    if key == "train":
        return bool(np.isclose(found["ne"], expected["ne"], rtol=1e-12)) and found | {"ne": 0} == expected | {"ne": 0}
    return torch.equal(found, expected) if isinstance(found, torch.Tensor) else bool(found == expected)


@dataclass
class Struck:
    """A fault that has happened, what was wrong with how the ranks ended, and what the next start has to show."""

    fault: Fault
    attempt: Attempt
    wrong: list[str] = field(default_factory=list)
    expects: Callable[[Attempt], list[str]] = lambda last: []


def _ended(attempt: Attempt, victim: int, *said: str) -> list[str]:
    """All ranks failed, and one of them said each of ``said``; a victim that was first may be past saying anything."""
    wrong = [] if all(attempt.codes) else [f"a rank ended as if all were well: {attempt.codes}"]
    errors = " ".join(attempt.errors)
    return wrong + [f"nobody said {text!r} but {errors!r}" for text in said if text not in errors]


def killed(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """A rank is killed at the beginning of a step, or among its reductions."""
    fault = Fault("kill", rng.randrange(RANKS), rng.randrange(STEPS), reducing=rng.random() < 0.5)
    attempt = suite.attempt(name, variant, fault, told=told)
    wrong = [] if attempt.codes[fault.rank] == -signal.SIGKILL else [f"the fault did not happen: {attempt.codes}"]
    return Struck(fault, attempt, wrong + _ended(attempt, fault.rank, f"rank {fault.rank} does not answer"))


def killed_anytime(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """A rank is killed from outside, whatever it does: starting, training, evaluating, writing, ending."""
    fault = Fault("kill", rng.randrange(RANKS))
    attempt = suite.attempt(name, variant, fault, told=told, after_s=rng.uniform(0.0, suite.whole_s[variant]))
    over = attempt.codes == [0] * RANKS
    return Struck(fault, attempt, [] if over else _ended(attempt, fault.rank))


def writer_killed(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """The first rank is killed in the middle of writing a checkpoint; the half-written one is never taken."""
    fault = Fault("kill", synced=rng.randint(2, 30))
    attempt = suite.attempt(name, variant, fault, told=told)
    return Struck(fault, attempt, _ended(attempt, 0))


def told_in_training(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """A rank gets SIGTERM, or SIGINT, in a step: all write a checkpoint of one step."""
    kind, code = rng.choice((("terminate", 143), ("interrupt", 130)))
    fault = Fault(kind, rng.randrange(RANKS), rng.randrange(STEPS - 2), reducing=rng.random() < 0.5)  # type: ignore[arg-type]
    return _told(suite, name, variant, fault, code)


def told_in_evaluation(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """A rank gets SIGTERM in an evaluation: that is left, and done again after the restart."""
    evaluated = rng.randrange(EVALUATIONS) * EVAL_BATCHES + rng.randint(1, EVAL_BATCHES - 2)
    return _told(suite, name, variant, Fault("terminate", rng.randrange(RANKS), evaluated=evaluated), 143)


def _told(suite: Suite, name: str, variant: str, fault: Fault, code: int) -> Struck:
    attempt = suite.attempt(name, variant, fault)
    wrong = [] if attempt.codes == [code] * RANKS else [f"ended with {attempt.codes}, expected {code}"]
    summary = json.loads((suite.run_folder(name) / "summary.json").read_text())
    newest = suite.newest(name)
    if summary["status"] != "interrupted":
        wrong.append(f"the summary says {summary['status']}")
    if read_state(newest)["position"]["step"] != summary["train"]["steps"]:
        wrong.append(f"ended after step {summary['train']['steps']}, but the newest checkpoint is {newest.name}")
    return Struck(fault, attempt, wrong)


def disk_full(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """The first rank's files can grow no more, as on a full disk, once there is a checkpoint to keep."""
    # What is written first past the limit: the run log, or a checkpoint's tensors.
    fault = Fault("disk", step=rng.randrange(5, STEPS - 4), limit_bytes=rng.choice((4096, 200_000)))
    attempt = suite.attempt(name, variant, fault, told=told)
    wrong = [] if attempt.codes == [2] * RANKS else [f"ended with {attempt.codes}, expected 2"]
    # Where tables are spread all ranks write a checkpoint and know what befell one of them.
    said = ("cannot write", "File too large; the checkpoints saved before are kept")
    return Struck(fault, attempt, wrong + _ended(attempt, 0, *said))


def shard_corrupt(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """After a kill, a file of the newest checkpoint is damaged: the one before is taken, and it is said why."""
    fault = Fault("kill", rng.randrange(RANKS), rng.randrange(9, STEPS))
    attempt = suite.attempt(name, variant, fault, told=told)
    newest = suite.newest(name)
    file = rng.choice(sorted(newest.iterdir()))
    damage(file, rng)
    return Struck(
        fault,
        attempt,
        _ended(attempt, fault.rank),
        lambda last: [] if "; skipped" in last.said and newest.name in last.said else [f"{file} was not found damaged"],
    )


def damage(file: Path, rng: random.Random) -> None:
    """Removes a file, cuts it or changes a byte of it."""
    content = bytearray(file.read_bytes())
    match rng.randrange(3):
        case 0:
            file.unlink()
        case 1:
            file.write_bytes(content[: len(content) // 2])
        case _:
            content[rng.randrange(len(content))] ^= 0x55
            file.write_bytes(content)


def asleep(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """A rank stands still (SIGSTOP): the others end within ``distributed.timeout_s``, and name it."""
    fault = Fault("stop", rng.randrange(RANKS), rng.randrange(STEPS), reducing=rng.random() < 0.5)
    attempt = suite.attempt(name, variant, fault)
    return Struck(fault, attempt, _ended(attempt, fault.rank, f"rank {fault.rank} does not answer"))


def not_a_number(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """Rows of one rank give nan: all end, with the step, the rank and the rows."""
    fault = Fault("nan", rng.randrange(RANKS), rng.randrange(STEPS))
    attempt = suite.attempt(name, variant, fault, told=told)
    said = (f"rank {fault.rank}: step {fault.step}: the loss of", "on the rows", "train-00000.csv:")
    wrong = [] if attempt.codes == [2] * RANKS else [f"ended with {attempt.codes}, expected 2"]
    return Struck(fault, attempt, wrong + _ended(attempt, fault.rank, *said))


def other_rows(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """A rank's files lack a row: refused before the first step."""
    fault = Fault("rows", rng.randrange(RANKS))
    attempt = suite.attempt(name, variant, fault, told=told)
    return Struck(fault, attempt, _ended(attempt, fault.rank, "rank 1 reads other rows than rank 0"))


def input_ends(suite: Suite, name: str, variant: str, rng: random.Random, told: bool) -> Struck:
    """A rank's input ends before that of the others: their collectives part, and it is said where."""
    fault = Fault("ends", rng.randrange(RANKS), rng.randrange(1, STEPS))
    attempt = suite.attempt(name, variant, fault, told=told)
    return Struck(fault, attempt, _ended(attempt, fault.rank))


KINDS: Mapping[str, Callable[[Suite, str, str, random.Random, bool], Struck]] = {
    "kill -9 in a step": killed,
    "kill -9 at any time": killed_anytime,
    "kill -9 of the checkpoint writer": writer_killed,
    "SIGTERM or SIGINT in training": told_in_training,
    "SIGTERM in an evaluation": told_in_evaluation,
    "disk full": disk_full,
    "newest checkpoint damaged": shard_corrupt,
    "a rank sleeps (SIGSTOP)": asleep,
    "nan on one rank": not_a_number,
    "unequal input: other rows": other_rows,
    "unequal input: ends early": input_ends,
}


def report(outcomes: list[Outcome]) -> str:
    """A Markdown table with a line a fault."""
    lines = [
        "| fault | run | what | codes | ended after s | said | went on | wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        what = ", ".join(f"{key} {value}" for key, value in each.fault.items() if key != "kind")
        cells = (
            each.kind,
            each.variant + (", the other rank told" if each.told else ""),
            what,
            " ".join(map(str, each.codes)),
            f"{each.ended_s:.1f}",
            each.said,
            each.resumed_from,
            "; ".join(each.wrong) or "nothing",
        )
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def plan(faults: int | None, seed: int) -> list[tuple[str, str, random.Random]]:
    """Kind, variant and random numbers of each fault, which no other fault's depend on."""
    kinds, variants = list(KINDS), list(VARIANTS)
    if faults is None:
        return [(kind, variants[0], random.Random(f"{seed}, {kind}")) for kind in kinds]
    planned = [kinds[at % len(kinds)] for at in range(faults)]
    random.Random(seed).shuffle(planned)
    of_each = [random.Random(f"{seed}, {at}") for at in range(faults)]
    return [(kind, rng.choice(variants), rng) for kind, rng in zip(planned, of_each, strict=True)]


def main(
    faults: Annotated[int | None, typer.Option(min=1, help="So many at random; default: one of each kind.")] = None,
    seed: Annotated[int, typer.Option(help="Of kinds, ranks, steps and moments.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Write OUT.json and OUT.md, after each fault; goes on with what is there.")
    ] = None,
) -> None:
    """Let things happen, go on, audit; code 2 where a row is lost or doubled, or anything else is wrong."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    suite, planned = Suite(folder), plan(faults, seed)
    if out is not None and out.with_suffix(".json").exists():
        there = json.loads(out.with_suffix(".json").read_text())
        if (there["seed"], there["planned"]) != (seed, len(planned)):
            raise UserError(f"--out: {out.with_suffix('.json')} is of another series; choose another name or remove it")
        suite.outcomes = [Outcome(**each) for each in there["faults"]]
    for number, (kind, variant, rng) in list(enumerate(planned))[len(suite.outcomes) :]:
        found = suite.strike(kind, variant, rng, told=number % 2 == 1)
        print(f"{number + 1}/{len(planned)} {report([found]).splitlines()[-1]}", flush=True)
        if out is not None:
            record = {
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "environment": environment.describe(),
                "seed": seed,
                "planned": len(planned),
                "faults": [asdict(each) for each in suite.outcomes],
            }
            out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            out.with_suffix(".md").write_text(report(suite.outcomes), encoding="utf-8")
    wrong = [f"{each.kind} ({each.variant}): {line}" for each in suite.outcomes for line in each.wrong]
    if wrong:
        raise UserError("\n".join([f"{len(wrong)} things are wrong, see {folder}:", *wrong]))
    shutil.rmtree(folder)
    print(f"{len(planned)} faults, nothing wrong")


if __name__ == "__main__":
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command()(main)
    run(program)

"""The process of one point: how it is started, and what its log says of its end."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from erase_rec.sweep.record import PointRecord

LEASH = Path(__file__).with_name("leash.py")


@dataclass(frozen=True)
class Launch:
    """What all points of a sweep are started with.

    Attributes:
        folder: of the sweep.
        config: ``--config`` of every run.
        ranks: processes of a run.
        lock: descriptor that every run holds until it ends.
    """

    folder: Path
    config: Path
    ranks: int
    lock: int


@dataclass
class Running:
    """A point at work."""

    point: PointRecord
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Where this attempt's lines start, in bytes."""
    started_s: float

    @classmethod
    def start(cls, point: PointRecord, launch: Launch) -> Running:
        """Starts a point; one whose run folder exists goes on from its last checkpoint, or from the first step."""
        log = launch.folder / f"{point.folder}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        _sweep_away_partials(launch.folder / point.folder)
        command = train_command(point, launch)
        with log.open("ab") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            start = output.tell()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal reaches the sweep alone, which then interrupts each run once.
                start_new_session=True,
                pass_fds=(launch.lock,),
            )
        return cls(point, process, log, start, time.monotonic())

    def reason(self) -> str:
        """Why it failed: the last error of its log, or else how it ended and its last line."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if errors:
            return errors[-1]
        last = lines[-1] if lines else "nothing was printed"
        code = self.process.returncode
        if code < 0:
            return f"ended by {signal.Signals(-code).name}; the log ends with: {last}"
        return last if code else f"ended without a summary; the log ends with: {last}"

    def kill(self) -> None:
        """Ends it at once, with all processes of its session that are left."""
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def train_command(point: PointRecord, launch: Launch) -> list[str]:
    """What trains ``point``: a new run, or the rest of one that was interrupted."""
    python = [sys.executable, "-m"]
    if launch.ranks > 1:
        python += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(launch.ranks), "--module"]
    run = launch.folder / point.folder
    if (run / "config.yaml").is_file():
        return [*python, "erase_rec", "train", "--resume", str(run)]
    placed = [f"run.dir={run.parent}", f"run.name={run.name}"]
    return [*python, "erase_rec", "train", "--config", str(launch.config), *point.overrides, *placed]


def interrupt_all(running: Sequence[Running]) -> None:
    """Asks every run to end, as Ctrl-C does."""
    for each in running:
        each.process.send_signal(signal.SIGINT)


def _sweep_away_partials(run: Path) -> None:
    """Removes what a run left that was killed before its folder was whole."""
    for partial in run.parent.glob(f".{run.name}.*.partial"):
        shutil.rmtree(partial, ignore_errors=True)

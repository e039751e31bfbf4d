"""Tries every reader with inputs made up by hypothesis for as long as wanted, and keeps what breaks one.

    nice -n 10 python benchmarks/fuzz.py --minutes 60 --jobs 1 --out fuzz.json

What is tried and what must hold is in tests/cases/fuzz_*.py; `make test` tries the same targets briefly. Here each turn
of a target is a process of its own with a bound on its memory and a watch over its time, so that a crash, a hang or a
blow-up is known by the input that caused it. The smallest input of each fault is written to ``--corpus``, whence the
test replays it.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import hypothesis
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cases"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from erase_rec import environment
from erase_rec.cli.main import run
from erase_rec.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[1]
CORPUS = CHECKOUT / "tests" / "fuzz" / "corpus"
ROUND = 150
"""Inputs before the random numbers begin anew."""
HANG_S = 20.0
"""An input that takes longer is a fault."""
MEMORY_BYTES = 2 << 30
"""What a process may allocate once its target is ready."""
GRACE_S = 90.0


@dataclass
class Found:
    """What a turn, or all turns, of a target came to; ``faults`` are by what went wrong where."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    peak_mib: float = 0.0
    faults: dict[str, str] = field(default_factory=dict)

    def add(self, other: Found) -> None:
        """Takes over another turn's."""
        self.inputs += other.inputs
        self.accepted += other.accepted
        self.refused += other.refused
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.peak_mib = max(self.peak_mib, other.peak_mib)
        self.faults |= other.faults


class HangError(BaseException):
    """An input took too long; not an Exception, so that no reader takes it for one of its own."""


def main(
    out: Annotated[Path, typer.Option(help="JSON file with what was found, written anew after every turn.")],
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 60.0,
    jobs: Annotated[int, typer.Option(min=1, help="Targets at a time.")] = 1,
    turn_s: Annotated[float, typer.Option(min=1, help="Seconds of a target before the next one's turn.")] = 60.0,
    only: Annotated[list[str] | None, typer.Option(help="Target; give it once for each. Default: all.")] = None,
    corpus: Annotated[Path, typer.Option(help="Folder for inputs that break something.")] = CORPUS,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
) -> None:
    """Searches, and prints a table."""
    from fuzz_targets import TARGETS

    for name in only or ():
        if name not in TARGETS:
            raise UserError(f"--only: unknown target {name!r}; there are {', '.join(TARGETS)}")
    names = list(only or TARGETS)
    found = {name: Found() for name in names}
    start = time.monotonic()

    def left() -> float:
        return minutes * 60 - (time.monotonic() - start)

    turns = [(turn, name) for turn in range(10**4) for name in names]
    queue = iter(turns)

    def work() -> None:
        for turn, name in queue:
            if left() < 5:
                return
            result = _turn(name, seed * 10**6 + turn, min(turn_s, left()), corpus, found[name].faults)
            found[name].add(result)
            _write(out, found, time.monotonic() - start, seed)

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work) for _ in range(jobs)]:
            future.result()
    typer.echo(table(found))
    typer.echo(f"wrote {out}")


def table(found: dict[str, Found]) -> str:
    """What was found, in Markdown."""
    lines = [
        "| target | inputs | read | refused | faults | slowest (s) | peak memory (MiB) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        lines.append(
            f"| {name} | {each.inputs:,} | {each.accepted:,} | {each.refused:,} | {len(each.faults)} "
            f"| {each.slowest_s:.2f} | {each.peak_mib:,.0f} |"
        )
    return "\n".join(lines)


def _write(out: Path, found: dict[str, Found], seconds: float, seed: int) -> None:
    plain = {
        "seconds": round(seconds),
        "seed": seed,
        "environment": environment.describe(),
        "targets": {name: asdict(each) for name, each in found.items()},
    }
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)


def _turn(name: str, seed: int, seconds: float, corpus: Path, known: dict[str, str]) -> Found:
    """A turn in a process of its own; one that dies is a fault of the input it was at."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        work = Path(folder)
        (work / "known.json").write_text(json.dumps(known))
        command = [sys.executable, __file__, "turn", name, str(work), "--seed", str(seed), "--seconds", str(seconds)]
        with (work / "output").open("wb") as output:
            child = subprocess.Popen([*command, "--corpus", str(corpus)], stdout=output, stderr=subprocess.STDOUT)
            try:
                code = child.wait(seconds + GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                code = child.wait()
        found = Found()
        if (work / "found.json").is_file():
            found = Found(**json.loads((work / "found.json").read_text()))
        if code:
            what = f"died with {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            tail = (work / "output").read_text(errors="replace")[-3000:]
            content = (work / "current").read_bytes() if (work / "current").is_file() else b""
            key = f"{what}: {_place_of_death(tail)}"
            if key not in known:
                found.faults[key] = tail
                keep(corpus, name, content)
        return found


def _place_of_death(output: str) -> str:
    frames = [line.strip() for line in output.splitlines() if line.strip().startswith("File")]
    return frames[0] if frames else output.strip().splitlines()[-1] if output.strip() else "no output"


def keep(corpus: Path, name: str, content: bytes) -> Path:
    """Writes an input to the corpus."""
    folder = corpus / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(content).hexdigest()[:12]
    path.write_bytes(content)
    return path


def turn(
    name: Annotated[str, typer.Argument(help="Target.")],
    work: Annotated[Path, typer.Argument(help="Folder to work in.")],
    seconds: Annotated[float, typer.Option(help="How long.")],
    seed: Annotated[int, typer.Option(help="Of the random numbers.")],
    corpus: Annotated[Path, typer.Option(help="Folder for inputs that break something.")],
) -> None:
    """One turn of one target (what the main command starts)."""
    from fuzz_targets import TARGETS

    faulthandler.enable()
    folder = work / "target"
    folder.mkdir()
    with chdir(folder):
        opened = TARGETS[name].open(folder)
        peak = _peak_mib()
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
        signal.signal(signal.SIGALRM, _hang)
        search = _Search(opened, work, json.loads((work / "known.json").read_text()), time.monotonic() + seconds)
        for content in opened.examples:
            search.guarded(content)
        while time.monotonic() < search.until:
            search.round(seed)
            seed += 10**9
    search.found.peak_mib = _peak_mib() - peak
    for key, content in search.smallest.items():
        path = keep(corpus, name, content)
        search.found.faults[key] += f"\ninput: {path.name} ({len(content)} bytes)"
    (work / "found.json").write_text(json.dumps(asdict(search.found)))


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError(f"longer than {HANG_S} s")


class _Search:
    """Tries inputs, and keeps the smallest one of each fault."""

    def __init__(self, opened: Any, work: Path, known: dict[str, str], until: float) -> None:
        self.found, self.until = Found(), until
        self.smallest: dict[str, bytes] = {}
        self._opened, self._work, self._known = opened, work, set(known)

    def round(self, seed: int) -> None:
        """``ROUND`` inputs, or up to the first new fault, which is made small."""

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=ROUND,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            report_multiple_bugs=False,
        )
        @hypothesis.given(self._opened.inputs)
        def some(content: bytes) -> None:
            if time.monotonic() < self.until:
                self._try(content)

        before = set(self.smallest)
        try:
            some()
        except BaseException as error:  # whatever hypothesis makes of a fault that was noted in _try
            if isinstance(error, KeyboardInterrupt):
                raise
        self._known |= self.smallest.keys() - before

    def guarded(self, content: bytes) -> None:
        """Tries an input without hypothesis."""
        before = set(self.smallest)
        try:
            self._try(content)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
        self._known |= self.smallest.keys() - before

    def _try(self, content: bytes) -> None:
        from fuzz_target import attempt

        (self._work / "current").write_bytes(content)
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        try:
            accepted = attempt(self._opened, content)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if isinstance(error, KeyboardInterrupt):
                raise
            key = signature(error)
            if key in self._known:
                return
            if key not in self.smallest or len(content) < len(self.smallest[key]):
                self.smallest[key] = content
                self.found.faults[key] = "".join(traceback.format_exception(error)[-12:])[-3000:]
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.found.inputs += 1
            self.found.slowest_s = max(self.found.slowest_s, time.monotonic() - start)
        if accepted:
            self.found.accepted += 1
        else:
            self.found.refused += 1


def signature(error: BaseException) -> str:
    """What went wrong where: the same for all inputs of one fault, nearly always."""
    if isinstance(error, RecursionError | HangError | MemoryError):
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if str(CHECKOUT) in frame.filename]
        ours = [frame for frame in frames if "/cases/" not in frame.filename and "/benchmarks/" not in frame.filename]
        place = f"{Path(ours[0].filename).name} {ours[0].name}" if ours else "?"
        return f"{type(error).__name__} under {place}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = re.sub("[0-9]+", "N", str(error).split(":")[0][:60]) if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} in {Path(last.filename).name} {last.name} {what}".strip()


app = typer.Typer(pretty_exceptions_enable=False)
app.command("search")(main)
app.command("turn")(turn)


def _arguments(given: Sequence[str]) -> list[str]:
    """``search`` is what is meant where no command is named."""
    return list(given) if given[:1] in (["turn"], ["search"], ["--help"]) else ["search", *given]


if __name__ == "__main__":
    sys.argv[1:] = _arguments(sys.argv[1:])
    run(app)

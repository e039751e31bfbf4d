"""Peers on the rows of our own arms: the same grid of rates on validation rows, then several seeds on test rows.

    python benchmarks/peers/encode.py movielens frappe adult sparrow criteo
    python benchmarks/peers/run.py movielens frappe adult sparrow criteo --jobs 2 --python fuxictr=PYTHON

Every result is a line of ``OUT`` (JSON), and what is there already is not run again, so it may be stopped at any time.
When the grid of a model on a set is complete, its best point runs with the seeds of ``--seeds``. Then
``report.py`` makes the tables. ``README.md`` says how each peer's environment is made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODELS = {
    "fuxictr": ("DLRM", "DCNv2", "DeepFM", "FinalMLP", "MaskNet"),
    "deepctr": ("DeepFM", "DCNMix", "xDeepFM", "AutoInt"),
    "torchrec": ("DLRM", "DLRM_DCN"),
}
PYTORCH_GRID = (
    (1e-3, "adagrad", 3e-2),
    (1e-3, "adam", 1e-2),
    (1e-2, "adam", 3e-3),
    (1e-2, "adam", 3e-2),
    (3e-3, "adam", 3e-3),
    (3e-3, "adagrad", 3e-2),
    (1e-3, "adagrad", 1e-2),
    (3e-3, "adam", 1e-2),
    (1e-3, "adam", 3e-3),
    (1e-2, "adagrad", 1e-2),
    (3e-2, "adam", 3e-2),
    (1e-3, "adam", 1e-3),
)
TORCHREC_GRID = (
    (1e-3, "rowwise_adagrad", 3e-2),
    (1e-3, "rowwise_adagrad", 1e-1),
    (1e-2, "rowwise_adagrad", 3e-2),
    (3e-3, "adagrad", 3e-2),
    (3e-3, "rowwise_adagrad", 3e-2),
    (3e-3, "rowwise_adagrad", 1e-1),
    (1e-3, "adagrad", 3e-2),
    (1e-2, "rowwise_adagrad", 1e-1),
    (1e-3, "rowwise_adagrad", 1e-2),
    (1e-3, "adagrad", 1e-2),
    (3e-3, "rowwise_adagrad", 3e-1),
    (1e-2, "rowwise_adagrad", 1e-2),
)
"""Rate of the layers' Adam, optimizer and rate of the tables: twelve each, as ``sweeps/objectives_*.yaml`` have.
PyTorch has no row-wise Adagrad, FBGEMM on a CPU no Adam. The likeliest come first, so that a run that is cut short has
lost the last ones, for all models alike."""

RATES = ("dense_lr", "table_optimizer", "table_lr")

Task = dict[str, Any]
Key = tuple[Any, ...]


def key_of(task: Task) -> Key:
    """What makes two tasks the same."""
    names = ("set", "peer", "model", "seed", *RATES, "test")
    return tuple(task[name] for name in names)


class Plan:
    """What is still to be run; shared by threads."""

    def __init__(self, sets: Sequence[str], models: Sequence[tuple[str, str]], arguments: argparse.Namespace) -> None:
        """Reads what the file of results has already."""
        self._rows, self._out = arguments.rows, arguments.out
        self._seeds, self._points = arguments.seeds, arguments.points
        self._lock, self._chosen = threading.Lock(), set[Key]()
        lines = self._out.read_text(encoding="utf-8").splitlines() if self._out.exists() else []
        self._known = [json.loads(line) for line in lines]
        done = {key_of(task) for task in self._known}
        grids = [self._grid(name, *model) for name in sets for model in models]
        turns = itertools.chain.from_iterable(zip(*grids, strict=True))
        self._waiting = [task for task in turns if key_of(task) not in done]
        for grid in grids:
            self._choose(grid[0])

    def take(self) -> Task | None:
        """The next one."""
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    def close_grids(self) -> None:
        """Drops what is left of the grids, and asks for the seeds of the best points that there are."""
        with self._lock:
            left = [task for task in self._waiting if not task["test"]]
            self._waiting = [task for task in self._waiting if task["test"]]
            for task in {(each["set"], each["peer"], each["model"]): each for each in left}.values():
                self._choose(task, complete=False)

    def finish(self, task: Task) -> None:
        """Keeps a result, and asks for the seeds when it was the grid's last."""
        with self._lock:
            self._known.append(task)
            with self._out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(task) + "\n")
            if not task["test"]:
                self._choose(task)

    def _grid(self, name: str, peer: str, model: str) -> list[Task]:
        fixed = {"set": name, "folder": str(self._rows / name), "peer": peer, "model": model, "seed": 1, "test": False}
        points = (TORCHREC_GRID if peer == "torchrec" else PYTORCH_GRID)[: self._points]
        return [fixed | dict(zip(RATES, point, strict=True)) for point in points]

    def _choose(self, of: Task, *, complete: bool = True) -> None:
        grid = {key_of(task) for task in self._grid(of["set"], of["peer"], of["model"])}
        found = [task for task in self._known if key_of(task) in grid]
        model = (of["set"], of["peer"], of["model"])
        if not found or model in self._chosen or (complete and len(found) < len(grid)):
            return
        self._chosen.add(model)
        best = min(found, key=lambda task: float(min(task["valid_ne"])))
        chosen = {name: best[name] for name in ("set", "folder", "peer", "model", *RATES)}
        tasks = [chosen | {"seed": seed, "test": True} for seed in range(1, self._seeds + 1)]
        done = {key_of(task) for task in self._known}
        self._waiting += [task for task in tasks if key_of(task) not in done]


class Workers:
    """A process for each peer that was asked for."""

    def __init__(self, pythons: dict[str, str], threads: int) -> None:
        """Starts nothing yet."""
        self._pythons, self._threads = pythons, threads
        self._running: dict[str, subprocess.Popen[str]] = {}

    def answer(self, task: Task) -> Task:
        """Runs a task.

        Raises:
            RuntimeError: its process has ended.
        """
        peer = task["peer"]
        if peer not in self._running:
            command = [self._pythons.get(peer, sys.executable), str(HERE / "worker.py"), peer]
            self._running[peer] = subprocess.Popen(
                [*command, "--threads", str(self._threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process = self._running[peer]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            self._running.pop(peer, None)
            raise RuntimeError(f"{peer}: its process ended with {process.wait()} at {task}")
        found: Task = json.loads(line)
        return found

    def end(self) -> None:
        """Closes them."""
        for process in list(self._running.values()):
            process.kill()
            process.wait()


def work(plan: Plan, pythons: dict[str, str], close_at: float, stop_at: float) -> None:
    """Runs tasks until there are none, or until ``stop_at``; from ``close_at`` on seeds alone (both ``monotonic``)."""
    workers = Workers(pythons, 1)
    timer = threading.Timer(max(0.0, stop_at - time.monotonic()), workers.end)
    timer.daemon = True
    timer.start()
    while time.monotonic() < stop_at:
        if time.monotonic() > close_at:
            plan.close_grids()
        if (task := plan.take()) is None:
            break
        try:
            done = workers.answer(task)
        except (RuntimeError, BrokenPipeError) as error:  # one peer's failure is not the others'
            print(error, file=sys.stderr, flush=True)
            continue
        plan.finish(done)
        names = " ".join(str(done[name]) for name in ("set", "peer", "model", "seed", *RATES))
        test = f", test {done['test_ne']:.5f}" if done["test"] else ""
        print(f"{names}: {min(done['valid_ne']):.5f}{test} in {done['seconds']:.1f} s", flush=True)
    timer.cancel()
    workers.end()


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", help="as encode.py wrote them, those that take longest first")
    parser.add_argument("--models", nargs="+", metavar="PEER/MODEL", help="all of them, if left out")
    parser.add_argument("--rows", type=Path, default=Path("build/peers"))
    parser.add_argument("--out", type=Path, default=Path("build/peers/results.jsonl"))
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PYTHON")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--points", type=int, default=len(PYTORCH_GRID), help="of the grid, the first ones")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=1e6)
    parser.add_argument("--grid-s", type=float, default=1e6, help="after which grids are closed, complete or not")
    arguments = parser.parse_args()
    models = [(peer, model) for peer, names in MODELS.items() for model in names]
    if arguments.models:
        models = [(peer, model) for peer, model in models if f"{peer}/{model}" in arguments.models]
    pythons = dict(each.split("=", 1) for each in arguments.python)
    plan = Plan(arguments.sets, models, arguments)
    close_at, stop_at = (time.monotonic() + seconds for seconds in (arguments.grid_s, arguments.limit_s))
    threads = [threading.Thread(target=work, args=(plan, pythons, close_at, stop_at)) for _ in range(arguments.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()

"""Many short training runs side by side, each on one thread, in processes that have loaded torch already.

``erase-rec sweep`` starts an interpreter for each run, which takes as long as a small set's first epochs. Here a run is
a call; what it came to is a line of a file, so that a series that was stopped goes on after its last finished run.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from erase_rec.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ["erase_rec.api.trainer", "erase_rec.api.run"]


@dataclass(frozen=True)
class Job:
    """A run that is to be.

    Attributes:
        group: the set that it is of; runs of one take about as long.
        arm: what is compared.
        variant: the point of the grid, or nothing.
        seed: of the configuration.
        config: file.
        overrides: of ``config``, without the seed.
        scores: file that logits go to, float32 [n] in the order of the rows; None: none.
        test: file whose rows these are, scored with the best checkpoint; None: the run's held-out rows at its end.
    """

    group: str
    arm: str
    variant: str
    seed: int
    config: str
    overrides: tuple[str, ...]
    scores: str | None = None
    test: str | None = None

    @property
    def name(self) -> tuple[str, str, str, int]:
        """What no two jobs of a series share."""
        return self.group, self.arm, self.variant, self.seed


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        job: the run.
        evals: held-out (step, NE, AUC) of each evaluation.
        rows_per_s: mean over the run's steps.
        seconds: of the whole run.
        error: why it failed; None: it did not.
    """

    job: Job
    evals: tuple[tuple[int, float, float], ...] = ()
    rows_per_s: float = 0.0
    seconds: float = 0.0
    error: str | None = None

    def best(self) -> tuple[float, int]:
        """Lowest held-out NE, and after which step it was there."""
        return min((ne, step) for step, ne, _ in self.evals)

    @classmethod
    def read(cls, line: str) -> Self:
        """Of a line of the file."""
        values = json.loads(line)
        job = values["job"]
        evals = tuple((step, ne, auc) for step, ne, auc in values["evals"])
        return cls(**values | {"job": Job(**job | {"overrides": tuple(job["overrides"])}), "evals": evals})


def read_results(file: Path) -> list[Result]:
    """What was finished; a last line that was cut off is left out."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    found = [Result.read(line) for line in lines if line.endswith("\n")]
    return [result for result in found if result.error is None]


def run_all(jobs: Sequence[Job], file: Path, *, processes: int, limit_s: float, threads: int = 1) -> list[Result]:
    """Runs what ``file`` does not hold yet, in the order given, and appends to it.

    Args:
        jobs: the runs; failed ones of an earlier call are tried again.
        file: a line a run.
        processes: at a time.
        limit_s: no run starts that would, as long as the longest one of its group so far, not end by then.
        threads: of a run.

    Returns:
        All finished runs of ``file``.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {result.job.name for result in read_results(file)}
    _cut_torn_line(file)
    ahead = iter([job for job in jobs if job.name not in done])
    start = time.monotonic()
    with _pool(processes, threads) as pool, file.open("a", encoding="utf-8") as out:
        for result in _finished(pool, ahead, processes, start + limit_s):
            out.write(json.dumps(asdict(result)) + "\n")
            out.flush()
            told = result.error or f"NE {result.best()[0]:.5f} at step {result.best()[1]}"
            spent = f"{time.monotonic() - start:.0f} s"
            print(spent, *result.job.name, told, f"{result.seconds:.1f} s", flush=True)
    return read_results(file)


def _cut_torn_line(file: Path) -> None:
    if file.exists() and not (content := file.read_bytes()).endswith(b"\n"):
        file.write_bytes(content[: content.rfind(b"\n") + 1])


def _pool(processes: int, threads: int) -> ProcessPoolExecutor:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Read when torch and NumPy load, which the server does before anything is asked of it.
    os.environ |= {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ProcessPoolExecutor(processes, context)


def _finished(pool: ProcessPoolExecutor, ahead: Iterator[Job], processes: int, until_s: float) -> Iterator[Result]:
    running: dict[Future[Result], Job] = {}
    longest: dict[str, float] = {}
    while True:
        while len(running) < processes and (job := next(ahead, None)) is not None:
            if time.monotonic() + longest.get(job.group, 0.0) < until_s:
                running[pool.submit(run, job)] = job
        if not running:
            return
        for each in wait(running, return_when=FIRST_COMPLETED).done:
            job, failure = running.pop(each), each.exception()
            result = each.result() if failure is None else Result(job, error=repr(failure))  # one of hundreds
            longest[result.job.group] = max(result.seconds, longest.get(result.job.group, 0.0))
            yield result


def run(job: Job) -> Result:
    """Trains once, in a folder that is gone afterwards."""
    from erase_rec import Config, Trainer
    from erase_rec.api.evaluation import evaluate

    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    folder, start = Path(tempfile.mkdtemp()), time.monotonic()
    scores = "true" if job.scores and job.test is None else "false"
    placed = [f"seed={job.seed}", f"run.dir={folder}", "run.name=run", f"eval.scores={scores}"]
    try:
        trainer = Trainer(Config.from_yaml(job.config, [*job.overrides, *placed]), progress=False)
        summary = trainer.fit()
        with (trainer.folder / "metrics.jsonl").open(encoding="utf-8") as log:
            rows = [json.loads(line) for line in log]
        evals = tuple((row["step"], row["eval/ne"], row["eval/auc"]) for row in rows if row.get("eval/ne") is not None)
        if job.scores is not None and job.test is not None:
            evaluated = evaluate(trainer.folder, [f"data.eval={job.test}"], keep_scores=True)
            assert evaluated.scores is not None
            _keep_scores(evaluated.scores, Path(job.scores))
        elif job.scores is not None:
            _keep_scores(pq.read_table(trainer.folder / "scores.parquet"), Path(job.scores))
        return Result(job, evals, summary.throughput.qps_mean, time.monotonic() - start)
    except UserError as error:
        return Result(job, seconds=time.monotonic() - start, error=str(error))
    finally:
        logging.disable(disabled)
        shutil.rmtree(folder)


def _keep_scores(table: pa.Table, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = table.sort_by("row_id")
    np.save(file, rows["logit"].to_numpy().astype(np.float32))
    labels = file.with_name("label.npy")
    partial = file.with_suffix(".label.npy")
    np.save(partial, rows["label"].to_numpy())
    partial.replace(labels)  # the same in every run of a set; whole at any time

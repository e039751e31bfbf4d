"""``train.py`` on one rank, with a planted fault, for faults.py.

    ERASE_REC_FAULT='{"kind": "kill", "rank": 1, "step": 7}' python benchmarks/faults_rank.py RECORD FEATURE ...

Of each start, RECORD-0-0, RECORD-0-1 ... (number of the start, rank) get one entry for each step that a rank begins:
the step, from 0, the number of its rows, and their table rows of the sparse feature FEATURE, which must have one value
a row. An entry is written at once and in one piece, before the step asks for its first collective: of a step that any
rank finished, every rank's entry is there. A fault happens at the first start only.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from erase_rec.batch import Batch
from erase_rec.cli.main import app, run
from erase_rec.distributed.world import Pending, World
from erase_rec.training_loop import TrainingLoop

Kind = Literal["none", "kill", "stop", "terminate", "interrupt", "nan", "disk", "ends", "rows"]
FAULT = "ERASE_REC_FAULT"
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which rank and where; one of ``step``, ``evaluated`` and ``synced`` says where.

    Attributes:
        kind: a signal that the rank sends itself; ``nan`` in its rows of a step; ``disk``: files can no longer grow
            beyond ``limit_bytes``; ``ends``: its input ends; ``rows``: its files have other rows from the start.
        rank: which.
        step: when it begins this step.
        reducing: not when it begins the step, but when it asks for its first reduction.
        evaluated: when it has scored so many held-out batches.
        synced: when it synchronises its so-manieth file or folder: in the middle of writing a checkpoint.
        limit_bytes: see ``disk``.
    """

    kind: Kind = "none"
    rank: int = 0
    step: int | None = None
    reducing: bool = False
    evaluated: int | None = None
    synced: int | None = None
    limit_bytes: int | None = None


def strike(fault: Fault) -> None:
    """Lets it happen to this process."""
    print(f"fault: {fault}", file=sys.stderr, flush=True)
    if fault.limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.limit_bytes, resource.RLIM_INFINITY))
    else:
        os.kill(os.getpid(), SIGNALS[fault.kind])


def counted(count: int | None, act: Callable[[], None]) -> Callable[[], None]:
    """Acts when it is called for the ``count``-th time."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            act()

    return call


def watch(record: str, feature: str, fault: Fault) -> None:
    """From now on every step of this process is written down, and ``fault`` happens where it says."""
    rank = int(os.environ.get("RANK", "0"))
    start = next(start for start in itertools.count() if not os.path.exists(f"{record}-{start}-{rank}"))
    file = os.open(f"{record}-{start}-{rank}", os.O_WRONLY | os.O_CREAT)
    fault = fault if fault.rank == rank and start == 0 else Fault()
    train_on, finished, held_out = TrainingLoop._train_on, TrainingLoop._finished, TrainingLoop._held_out
    mean, fsync = World.mean, os.fsync
    at_a_reduction = False

    def recorded(loop: TrainingLoop, batch: Batch) -> None:
        nonlocal at_a_reduction
        step = loop.position.step
        names = [each.name for each in loop.parts.config.features.sparse]
        rows = batch.sparse.values.view(len(names), -1)[names.index(feature)].cpu().numpy()
        os.write(file, np.array([step, len(rows), *rows], dtype=np.int64).tobytes())
        if step == fault.step and fault.kind == "nan":
            batch = replace(batch, dense=torch.full_like(batch.dense, torch.nan))
        elif step == fault.step and fault.kind != "ends":
            if fault.reducing:
                at_a_reduction = True
            else:
                strike(fault)
        train_on(loop, batch)

    def reduced(world: World, group: str, tensor: torch.Tensor) -> Pending:
        nonlocal at_a_reduction
        if at_a_reduction:
            at_a_reduction = False
            strike(fault)
        return mean(world, group, tensor)

    def ended(loop: TrainingLoop) -> bool:
        return finished(loop) or (fault.kind == "ends" and loop.position.step == fault.step)

    after_batch = counted(fault.evaluated, lambda: strike(fault))
    before_sync = counted(fault.synced, lambda: strike(fault))

    def evaluated(loop: TrainingLoop) -> Generator[Batch]:
        for batch in held_out(loop):
            yield batch
            after_batch()

    def synced(descriptor: Any) -> None:
        before_sync()
        fsync(descriptor)

    TrainingLoop._train_on = recorded  # type: ignore[method-assign]
    TrainingLoop._finished = ended  # type: ignore[method-assign]
    TrainingLoop._held_out = evaluated  # type: ignore[method-assign]
    World.mean = reduced  # type: ignore[method-assign]
    os.fsync = synced


def main() -> None:
    """Takes its own two arguments from the front; the rest are those of ``erase-rec train``."""
    fault = Fault(**json.loads(os.environ.get(FAULT, "{}")))
    record, feature, *arguments = sys.argv[1:]
    watch(record, feature, fault)
    if fault.kind == "rows" and fault.rank == int(os.environ.get("RANK", "0")):
        arguments = [each.replace("/train-00000.csv", "/other-00000.csv") for each in arguments]
    sys.argv[1:] = ["train", *arguments]
    run(app)


if __name__ == "__main__":
    main()

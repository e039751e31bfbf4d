"""Trains what its standard input asks for, in a peer's own environment; one JSON object a line, in and out.

echo '{"folder": "build/peers/frappe", "model": "DLRM", "seed": 1, "dense_lr": 1e-3, "table_lr": 1e-2}' > task
PEER-PYTHON benchmarks/peers/worker.py fuxictr < task
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rows import Fields, Part, Setting, Watch, read_fields, read_part

ADAPTERS = {"fuxictr": "fuxictr_models", "deepctr": "deepctr_models", "torchrec": "torchrec_models"}


@functools.cache
def part_of(folder: str, part: str) -> Part:
    """Rows are read once."""
    return read_part(Path(folder) / f"{part}.npz")


@functools.cache
def fields_of(folder: str) -> Fields:
    """Likewise."""
    return read_fields(Path(folder))


def setting_of(task: dict[str, Any]) -> Setting:
    """Seed, optimizers and dropout."""
    names = ("seed", "dense_lr", "table_optimizer", "table_lr")
    return Setting(*(task[name] for name in names), dropout=task.get("dropout", 0.0))


def fitted(adapter: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Trains with early stopping; the test rows are read where the task asks for them."""
    folder, fields = task["folder"], fields_of(task["folder"])
    train, valid = part_of(folder, "train"), part_of(folder, "valid")
    watch = Watch(valid, part_of(folder, "test") if task.get("test") else None, fields.patience)
    peer = adapter.Peer(task["model"], fields, setting_of(task))
    peer.train(peer.rows(train), fields.epochs, watch)
    return {"valid_ne": watch.ne, "test_ne": watch.test_ne, "test_auc": watch.test_auc}


@functools.cache
def warm_peer(adapter: Any, folder: str, model: str) -> Any:
    """A model that has trained on some rows already, for timing; made once."""
    peer = adapter.Peer(
        model,
        fields_of(folder),
        Setting(1, 1e-3, "rowwise_adagrad" if adapter.__name__ == "torchrec_models" else "adam", 1e-3),
    )
    peer.train(peer.rows(part_of(folder, "train").take(slice(20_000))))
    return peer


def timed(adapter: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Rows a second of one epoch over the first rows."""
    peer = warm_peer(adapter, task["folder"], task["model"])
    rows = peer.rows(part_of(task["folder"], "train").take(slice(task["time"])))
    start = time.perf_counter()
    peer.train(rows)
    return {"rows_per_s": task["time"] / (time.perf_counter() - start)}


def main() -> None:
    """Answers each line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=ADAPTERS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # what a peer prints is no answer
    adapter = importlib.import_module(ADAPTERS[arguments.peer])
    for line in sys.stdin:
        task = json.loads(line)
        start = time.perf_counter()
        answer = timed(adapter, task) if "time" in task else fitted(adapter, task)
        answer["seconds"] = time.perf_counter() - start
        answer["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(task | answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

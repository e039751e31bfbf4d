"""Ids of spread tables that are sent a step ahead: the same bits as without, one order on every rank, every end."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import call
from schedule_cases import CPU, State, make_batch, make_config, make_gradients, make_step, rank_share, tower
from torch import Tensor

from erase_rec.batch import Batch
from erase_rec.config.schema import Config
from erase_rec.distributed.collective_log import CollectiveLog
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.shards import Shards
from erase_rec.distributed.world import World
from erase_rec.finite import NonFiniteLossError
from erase_rec.prefetch import prefetch
from models.ctr_model import build_model
from models.embeddings.build import build_rank_embeddings
from models.embeddings.exchanged import ExchangedTables
from models.embeddings.layout import IdRangeError

ROWS_OF = {"a": 11, "b": 7, "c": 5}
STEPS = 20
SHARDINGS: dict[str, list[dict[str, Any]]] = {
    "table_wise": [],
    "row_wise": [],
    "column_wise": [{"name": name, "column_width": 4} for name in ROWS_OF],
    "auto": [{"name": "a", "sharding": "row_wise"}, {"name": "b", "sharding": "data_parallel"}],
}
"""The last one mixes what is sent with copies of a table."""
TOWERS = [
    tower("deep"),
    tower("dot", "deep", loss=0.5, target="joint", stream="shared"),
    tower("pairs", loss=2.0, target="joint", stream="shared"),
]


def config_of(sharding: str) -> Config:
    return make_config(
        TOWERS,
        embedding={"dim": 8, "sharding": sharding, "tables": SHARDINGS[sharding]},
        schedule={"exact_every": 4},
        distributed={"reduction": "bucket", "bucket_mib": 1e-4},
        optimizer={"dense": {"kind": "adam", "lr": 0.05}, "sparse": {"kind": "adagrad", "lr": 0.05, "eps": 1e-2}},
        train={"steps": 1, "local_batch_size": 6},
    )


def batches(rank: int, spoilt: dict[int, Batch] | None = None) -> Iterator[Batch]:
    """A rank's batches, for ever; every fifth, as an epoch's last one, is shorter."""
    step = 0
    while True:
        batch = rank_share(make_batch(step, 6 if step % 5 == 4 else 12, torch.float32), rank, 2)
        yield (spoilt or {}).get(step, batch)
        step += 1


class Run:
    """A model of spread tables, its step, and what its lookups gave in evaluation."""

    def __init__(self, config: Config, world: World, *, ahead: bool) -> None:
        world.collectives = CollectiveLog()
        self.embeddings, _ = build_rank_embeddings(config, ROWS_OF, CPU, torch.float32, world)
        self.model = build_model(config, self.embeddings, CPU)
        self.world, self.ahead, self.scored, self.step = world, ahead, list[Tensor](), 0
        self._train = make_step(config, make_gradients(self.model, config, world))

    def train(self, given: Iterator[Batch], count: int = STEPS, stop_after: int = STEPS) -> None:
        held_out = rank_share(make_batch(99, 8, torch.float32), self.world.rank, 2)
        expect = self.embeddings.expect if self.ahead else None
        for batch in prefetch(given, CPU, expect=expect, count=count):
            self.world.collectives.step = self.step
            self._train(batch)
            self.step += 1
            if self.step in {7, 13}:
                with torch.no_grad():
                    self.scored.append(self.embeddings(held_out.sparse))
            if self.step == stop_after:
                break
        self.embeddings.expect(None)

    def state(self) -> State:
        """Copies of everything dense and of this rank's parts of the tables."""
        found = {name: value.clone() for name, value in self.model.dense_state().items()}
        held = dict(self.embeddings.tables())
        for name, entries in self.embeddings.optimizer_state().items():
            held |= {f"{name}.{key}": value for key, value in entries.items()}
        for name, value in held.items():
            parts = [part.tensor for part in value.parts] if isinstance(value, Shards) else [value]
            found |= {f"tables.{name}.{number}": part.clone() for number, part in enumerate(parts)}
        return found

    def groups(self, step: int) -> list[str]:
        issued = [entry.group for entry in self.world.collectives.recent if entry.step == step]
        return [group for group in issued if group.startswith("tables.") and group != "tables.plan"]


def train_both_ways() -> list[dict[str, Any]]:
    found = []
    with join_world(on_cuda=False, timeout_s=60, grouped=True) as world:
        for sharding in SHARDINGS:
            runs = {}
            for ahead in (False, True):
                run = runs[ahead] = Run(config_of(sharding), world, ahead=ahead)
                run.train(batches(world.rank))
                found.append(
                    {"digest": world.collectives.digest(), "sent": world.collectives.sent_bytes["tables.input"]}
                )
                issued = [run.groups(step)[:4] for step in (0, 1, STEPS - 1)]
                now, early, exchange = (
                    ["tables.input_sizes", "tables.input"],
                    ["tables.input_sizes"],
                    ["tables.exchange"],
                )
                if ahead:
                    assert issued[0] == [*now, *exchange, *early]
                    assert issued[1] == [*exchange, *now, "tables.gradient"]
                    assert issued[2][:2] == [*exchange, "tables.gradient"], "nothing is sent that nobody looks up"
                else:
                    assert issued == [[*now, *exchange, "tables.gradient"]] * 3
            one, other = (run.state() for run in runs.values())
            assert one.keys() == other.keys()
            assert [name for name in one if not torch.equal(one[name], other[name])] == []
            assert all(map(torch.equal, runs[False].scored, runs[True].scored))
            assert len(runs[True].scored) == 2
            assert found[-1]["sent"] == found[-2]["sent"] > 0
    return found


@pytest.mark.timeout(200)
def test_the_same_bits_as_without_for_each_sharding_type(run_ranks: Any) -> None:
    first, second = run_ranks(2, train_both_ways, timeout_s=180)
    assert [run["digest"] for run in first] == [run["digest"] for run in second]


def end_early() -> int:
    """A run that stops before its steps are over, and a second one of the same tables."""
    with join_world(on_cuda=False, timeout_s=60, grouped=True) as world:
        run = Run(config_of("auto"), world, ahead=True)
        run.train(batches(world.rank), stop_after=3)
        sent = [entry.group for entry in world.collectives.recent].count("tables.input")
        run.train(batches(world.rank), count=2)
        assert sent == 3 + 1, "step 3's, which never came"
        return run.step


def end_by_nan() -> int:
    """Every loss of step 3 is nan; ids of step 4 are announced by then."""
    with join_world(on_cuda=False, timeout_s=60, grouped=True) as world:
        run = Run(config_of("row_wise"), world, ahead=True)
        good = next(batches(world.rank))
        with pytest.raises(NonFiniteLossError):
            run.train(batches(world.rank, {3: replace(good, dense=torch.full_like(good.dense, torch.nan))}))
        assert run.groups(3)[-1] == "tables.input_sizes"
        return run.step


def end_by_id() -> int:
    """An id of step 3 that no table has is refused there, though its batch was sent in step 2."""
    with join_world(on_cuda=False, timeout_s=60, grouped=True) as world:
        run = Run(config_of("row_wise"), world, ahead=True)
        good = next(batches(world.rank))
        values = good.sparse.values.clone()
        values[7] = 5000
        with pytest.raises(IdRangeError, match="feature 'b': id 5000 is outside"):
            run.train(batches(world.rank, {3: replace(good, sparse=replace(good.sparse, values=values))}))
        return run.step


def end_by_loader() -> None:
    """One rank cannot read batch 3, which it finds out when batch 2 is to be handed out."""
    with join_world(on_cuda=False, timeout_s=60, grouped=True) as world:
        run = Run(config_of("row_wise"), world, ahead=True)

        def failing() -> Iterator[Batch]:
            for step, batch in enumerate(batches(world.rank)):
                if step == 3 and world.rank == 1:
                    raise OSError(f"planted at step {run.step}")
                yield batch

        run.train(failing())


@pytest.mark.parametrize(("end", "steps"), [(end_early, 5), (end_by_nan, 3), (end_by_id, 3)])
def test_no_rank_is_left_waiting_however_a_run_ends(run_ranks: Any, end: Any, steps: int) -> None:
    assert run_ranks(2, end, timeout_s=100) == [steps, steps]


def test_an_error_of_one_ranks_loader_ends_the_other(run_ranks: Any) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        run_ranks(2, end_by_loader, timeout_s=50)
    assert str(caught.value) == "rank 0 ended without a result\nrank 1 ended without a result", "neither hangs"


TRAINING = [
    *("--config", "ctr_erase.yaml", "run.name=r", "train.threads=1", "embedding.sharding=row_wise"),
    *("data.params={rows: 601, eval_rows: 101}", "train.local_batch_size=30", "eval.local_batch_size=50"),
    *("train.epochs=null", "train.steps=15", "train.eval_every_steps=2", "distributed.check_every=3"),
    "train.early_stopping={patience: 2, min_delta: 1.0}",
]
"""The first evaluation is the best by a margin of 1, so that the run stops at the third, in step 6."""


def run_early_stopping(folder: Path, ahead: bool) -> dict[str, Any]:
    """The command on a rank; what the run came to."""
    with pytest.MonkeyPatch.context() as patch:
        if not ahead:
            patch.setattr(ExchangedTables, "expect", lambda *_: None)
        call(folder, "train", *TRAINING)
    logging.disable(logging.NOTSET)
    found: dict[str, Any] = json.loads((folder / "runs" / "r" / "summary.json").read_text())
    return found


@pytest.mark.timeout(320)
def test_a_run_that_stops_early_comes_to_the_same(run_ranks: Any, tmp_path: Path) -> None:
    found = []
    for ahead in (False, True):
        folder = tmp_path / str(ahead)
        folder.mkdir()
        found.append(run_ranks(2, run_early_stopping, folder, ahead, timeout_s=150)[0])
    one, other = found
    assert one["status"] == other["status"] == "stopped_early"
    assert one["train"]["steps"] == other["train"]["steps"] == 6
    assert one["eval"]["ne"] == other["eval"]["ne"]
    assert one["train"]["ne"] == other["train"]["ne"]

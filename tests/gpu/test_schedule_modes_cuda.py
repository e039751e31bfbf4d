"""Every legal way to launch and reduce, on CUDA with a one-rank NCCL group: the steps of the plain one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from data.dataset import Datasets, build_datasets
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts
from erase_rec.batch import Batch
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.world import World
from erase_rec.run_folder import RunFolder
from erase_rec.schedule.tower_graphs import WARM_UP_STEPS
from erase_rec.training_loop import Parts

pytestmark = pytest.mark.gpu
SMALL = ["data.params={rows: 20000, eval_rows: 2000}", "train.local_batch_size=2048", "train.device=cuda"]
LAUNCH = {
    "aggregate": ["schedule.preset=detached"],
    "blocking": ["schedule.preset=erase", "schedule.dispatch=blocking", "schedule.cuda_graph=none"],
    "non_blocking": ["schedule.preset=erase", "schedule.dispatch=non_blocking", "schedule.cuda_graph=none"],
    "graph": ["schedule.preset=erase", "schedule.dispatch=blocking", "schedule.cuda_graph=tower"],
    "graph_non_blocking": ["schedule.preset=erase", "schedule.dispatch=non_blocking", "schedule.cuda_graph=tower"],
}
REDUCTION = {
    "none": [],
    "bucket": ["distributed.reduction=bucket"],
    "ddp_fup": ["distributed.reduction=ddp", "distributed.find_unused_parameters=true"],
    "ddp": ["distributed.reduction=ddp", "distributed.find_unused_parameters=false"],
    "ddp_per_tower": ["distributed.reduction=ddp_per_tower"],
}
ILLEGAL = {
    ("non_blocking", "ddp_per_tower"),
    *itertools.product(["graph", "graph_non_blocking"], ["ddp_fup", "ddp_per_tower"]),
}
STEPS = 30
Plainly = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
LEGAL = [pair for pair in itertools.product(LAUNCH, REDUCTION) if pair not in ILLEGAL]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(on_cuda=True, timeout_s=60, grouped=True) as joined:
        yield joined


def load(*overrides: str) -> Config:
    return load_config("ctr_erase.yaml", [*SMALL, *overrides], catalog=ContentCatalog()).config


@pytest.fixture(scope="module")
def datasets() -> Datasets:
    return build_datasets(load(), pin=True)


@pytest.fixture(scope="module")
def batches(datasets: Datasets) -> list[Batch]:
    return [batch.to(torch.device("cuda")) for batch in datasets.train.batches(0) if batch.size == 2048]


def build(config: Config, datasets: Datasets, world: World) -> Parts:
    return build_parts(config, datasets, RunFolder(Path()), Machine.prepare(config), world)


def losses(parts: Parts, batches: list[Batch], steps: int) -> torch.Tensor:
    """Main and local losses of ``steps`` steps [steps, 1 + towers], without a host synchronisation in between."""
    found = []
    for step in range(steps):
        output = parts.step(batches[step % len(batches)])
        found.append(torch.stack([output.loss, *output.local_losses.values()]))
    return torch.stack(found).cpu()


@pytest.fixture(scope="module")
def plainly(world: World, datasets: Datasets, batches: list[Batch]) -> Plainly:
    """What :data:`STEPS` steps of one stream give under these overrides: losses, and the dense state after them."""

    @cache
    def trained(*overrides: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        parts = build(load(*overrides), datasets, world)
        return losses(parts, batches, STEPS), dict(parts.model.dense_state())

    return trained


@pytest.mark.parametrize("optimizer", ["end", "per_tower"])
@pytest.mark.parametrize("target", ["own", "joint"])
@pytest.mark.parametrize(("launch", "reduction"), LEGAL)
def test_steps_equal_the_aggregate(  # type: ignore[no-untyped-def]
    world, datasets, batches, plainly: Plainly, launch: str, reduction: str, target: str, optimizer: str
) -> None:
    """A missing wait, a lost or doubled gradient shows in the losses of the steps that follow."""
    targets = [f"towers.{tower.name}.loss.target={target}" for tower in load().towers]
    expected, state = plainly(*LAUNCH["aggregate"], *targets)
    found = build(
        load(*LAUNCH[launch], *REDUCTION[reduction], *targets, f"schedule.optimizer={optimizer}"), datasets, world
    )
    torch.testing.assert_close(losses(found, batches, STEPS), expected, rtol=2e-4, atol=2e-5)
    for name, value in state.items():
        torch.testing.assert_close(found.model.dense_state()[name], value, rtol=1e-2, atol=2e-4, msg=name)


@pytest.mark.parametrize("optimizer", ["end", "per_tower"])
@pytest.mark.parametrize("reduction", REDUCTION)
def test_exact_streams_equal_one_stream(  # type: ignore[no-untyped-def]
    world, datasets, batches, plainly: Plainly, reduction: str, optimizer: str
) -> None:
    """Nothing detached, one backward that autograd runs on the towers' streams."""
    expected, _ = plainly("schedule.preset=exact")
    extra = [*REDUCTION[reduction], f"schedule.optimizer={optimizer}"]
    found = build(load("schedule.preset=exact_streams", *extra), datasets, world)
    torch.testing.assert_close(losses(found, batches, STEPS), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("launch", ["graph", "graph_non_blocking"])
def test_a_short_batch_between_replays_changes_nothing(world, datasets, batches, launch: str) -> None:  # type: ignore[no-untyped-def]
    parts, plain = (build(load(*LAUNCH[name]), datasets, world) for name in (launch, "aggregate"))
    found, expected = [], []
    for step in range(WARM_UP_STEPS + 6):
        batch = batches[step % len(batches)]
        if step == WARM_UP_STEPS + 3:
            batch = next(iter(datasets.train.batches(1))).to(torch.device("cuda"))
            batch = Batch(batch.dense[:512], cut(batch, 512), batch.label[:512], batch.row_ids[:512])
        found.append(parts.step(batch).logit.clone())
        expected.append(plain.step(batch).logit.clone())
    for logit, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(logit, reference, rtol=1e-3, atol=1e-4)


def cut(batch: Batch, rows: int):  # type: ignore[no-untyped-def]
    """The bags of the first ``rows`` rows of a single-valued batch."""
    sparse = batch.sparse
    assert sparse.single_valued
    values = sparse.values.view(sparse.num_features, -1)[:, :rows].reshape(-1)
    return replace(sparse, values=values, lengths=sparse.lengths[: values.numel()])


def test_micro_batches_and_workers(world, datasets, batches) -> None:  # type: ignore[no-untyped-def]
    for extra in (["schedule.workers=3"], ["train.micro_batches=3"], ["train.micro_batches=2", "schedule.workers=2"]):
        found = build(load(*LAUNCH["non_blocking"], *REDUCTION["bucket"], *extra), datasets, world)
        expected = losses(build(load(*LAUNCH["aggregate"]), datasets, world), batches, 12)
        torch.testing.assert_close(losses(found, batches, 12), expected, rtol=2e-4, atol=2e-5)

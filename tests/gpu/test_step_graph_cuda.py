"""The step as one CUDA graph, with the tables or beside them: the steps of the plain launch, whatever changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.dataset import Datasets, build_datasets
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts
from erase_rec.batch import Batch, SparseBatch, StepOutput
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.finite import LAG_STEPS
from erase_rec.lr_schedule import LRSchedule
from erase_rec.prefetch import prefetch
from erase_rec.run_folder import RunFolder
from erase_rec.schedule.overlap import overlap_report
from erase_rec.schedule.program import program
from erase_rec.schedule.step_graphs import WARM_UP_STEPS
from erase_rec.training_loop import Parts, checkpoint_tensors

pytestmark = pytest.mark.gpu
ROWS = 512
SMALL = [
    "data.params={rows: 12000, eval_rows: 1000}",
    f"train.local_batch_size={ROWS}",
    "train.device=cuda",
    "train.tf32=false",
    "optimizer.lr_schedule.warmup_steps=10",
]
EARLY = ["schedule.preset=erase", "schedule.cuda_graph=step"]
CUDA = torch.device("cuda")


def load(*overrides: str) -> Config:
    return load_config("ctr_erase.yaml", [*SMALL, *overrides], catalog=ContentCatalog()).config


@pytest.fixture(scope="module")
def datasets() -> Datasets:
    return build_datasets(load(), pin=True)


@pytest.fixture(scope="module")
def batches(datasets: Datasets) -> list[Batch]:
    main = torch.cuda.current_stream()
    return [batch.to(CUDA).arriving(main) for batch in datasets.train.batches(0) if batch.size == ROWS]


def build(config: Config, datasets: Datasets) -> Parts:
    torch.cuda.manual_seed_all(1)
    return build_parts(config, datasets, RunFolder(Path()), Machine.prepare(config), World())


def step(parts: Parts, batch: Batch, number: int, schedule: LRSchedule, **keys: Any) -> StepOutput:
    """As the trainer does it: rates first."""
    factor = schedule.factor(number)
    parts.optimizer.set_lr(parts.config.optimizer.dense.lr * factor)
    parts.model.embeddings.set_lr(parts.config.optimizer.sparse.lr * factor)
    return parts.step(batch, **keys)


def losses(parts: Parts, batches: Sequence[Batch], steps: int, *, first: int = 0, total: int | None = None) -> Tensor:
    """Main and local losses of ``steps`` steps, without a host synchronisation of ours in between.

    They are the steps from ``first`` on of a run of ``total`` (all there are by default).
    """
    schedule = LRSchedule(parts.config.optimizer.lr_schedule, steps if total is None else total)
    torch.cuda.manual_seed_all(2 + first)  # dropout
    found = []
    for number in range(first, first + steps):
        output = step(parts, batches[number % len(batches)], number, schedule)
        found.append(torch.stack([output.loss, *output.local_losses.values()]))
    return torch.stack(found).cpu()


BOTH = pytest.mark.parametrize("graph", ["step", "dense"])


def both(datasets: Datasets, *overrides: str, graph: str = "step") -> tuple[Parts, Parts]:
    """The captured step of a configuration, and the same launched operation by operation."""
    if not any(each.startswith("schedule.preset") for each in overrides):
        overrides = ("schedule.preset=erase", *overrides)
    captured, plain = (load(*overrides, f"schedule.cuda_graph={kind}") for kind in (graph, "none"))
    return build(captured, datasets), build(plain, datasets)


WAYS = {
    "erase": [],
    "own targets": [f"towers.{name}.loss.target=own" for name in ("interaction", "cross", "deep", "attention")],
    "per tower": ["schedule.optimizer=per_tower"],
    "adagrad": ["optimizer.dense.kind=adagrad", "optimizer.sparse.kind=adagrad"],
    "clipped": ["optimizer.dense.max_grad_norm=0.01"],
    "exact": ["schedule.preset=exact"],
    "exact on streams": ["schedule.preset=exact_streams", "schedule.optimizer=per_tower"],
    "dropout": ["towers.deep.params.dropout=0.3", "over_arch.dropout=0.2"],
    "micro-batches": ["train.micro_batches=2"],
    "aggregate of detached towers": ["schedule.preset=detached"],
    "steps that cut nothing": ["schedule.exact_every=3"],
    "objectives": [
        "schedule.exact_every=7",
        "over_arch.logits=gated",
        "towers.interaction.loss.kind=bce_pairwise",
        "towers.mask.cut_at=1",
        "towers.dense_mlp.head.kind=goodness",
    ],
}


STEPS = 300
TOGETHER = 50
"""Steps after which the captured run takes over the plain one's state, as a resumed run does: a step goes on from the
one before, and what rounding makes of that grows tenfold in a hundred steps."""


def take_over(captured: Parts, plain: Parts) -> None:
    """Gives the captured run the state of the plain one, in place, as one that goes on from a checkpoint."""
    state, held = checkpoint_tensors(plain), checkpoint_tensors(captured)
    assert state.keys() == held.keys()
    for name, value in held.items():
        value.copy_(state[name])  # type: ignore[union-attr, arg-type]
    captured.optimizer.refresh()
    captured.model.embeddings.load_optimizer_state(
        {table: dict(entries) for table, entries in plain.model.embeddings.optimizer_state().items()}
    )


BESIDE_TABLES = ("erase", "exact on streams", "dropout", "micro-batches", "objectives")
"""Ways that differ in what lies between the tables' lookup and their update."""


@pytest.mark.parametrize(
    ("graph", "way"), [*(("step", way) for way in WAYS), *(("dense", way) for way in BESIDE_TABLES)]
)
def test_replays_are_the_plain_steps(datasets, batches, graph: str, way: str) -> None:  # type: ignore[no-untyped-def]
    """Three hundred steps with warm-up and decay of both learning rates, and a state taken over in the middle."""
    captured, plain = both(datasets, *WAYS[way], graph=graph)
    # A goodness is divided by a length: rounding is seen in ten steps; each is compared alone.
    together = 1 if way == "objectives" else TOGETHER
    for first in range(0, STEPS, together):
        if first > 0:
            take_over(captured, plain)
        expected, found = (losses(parts, batches, together, first=first, total=STEPS) for parts in (plain, captured))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    for name, value in plain.model.dense_state().items():
        torch.testing.assert_close(captured.model.dense_state()[name], value, rtol=1e-4, atol=1e-6, msg=name)
    for name, value in plain.model.embeddings.tables().items():
        torch.testing.assert_close(captured.model.embeddings.tables()[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert captured.metrics.window() == pytest.approx(plain.metrics.window(), rel=1e-6)


@pytest.mark.parametrize(("beside", "share"), [("false", 1), ("true", 1), ("false", 0.12)])
def test_bf16_replays_are_the_plain_steps(datasets, batches, beside: str, share: float) -> None:  # type: ignore[no-untyped-def]
    """Among the kernels are those whose parameters' gradients can run beside."""
    alike = ["schedule.preset=erase", "train.precision=bf16", f"schedule.matmul_share={share}"]
    plain = build(load(*alike, "schedule.cuda_graph=none"), datasets)
    placed = ["schedule.optimizer=per_tower", f"schedule.parameters_beside={beside}", "schedule.cuda_graph=step"]
    captured = build(load(*alike, *placed), datasets)
    for first in range(0, STEPS, TOGETHER):
        if first > 0:
            take_over(captured, plain)
        expected, found = (losses(parts, batches, TOGETHER, first=first, total=STEPS) for parts in (plain, captured))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_adam_of_the_tables_is_launched_plainly_and_says_why(datasets, batches, caplog) -> None:  # type: ignore[no-untyped-def]
    """Its count is a number of the host that changes in every step."""
    captured, plain = both(datasets, "optimizer.sparse.kind=adam")
    with caplog.at_level(logging.WARNING):
        found = losses(captured, batches, 20)
    torch.testing.assert_close(found, losses(plain, batches, 20), rtol=1e-5, atol=1e-7)
    said = [record.message for record in caplog.records if "uncaptured" in record.message]
    assert len(said) == 1
    assert "numbers of the host" in said[0]


def test_adam_of_the_tables_beside_a_dense_graph_holds_nothing_up(datasets, batches) -> None:  # type: ignore[no-untyped-def]
    adam = ["schedule.preset=erase", "optimizer.sparse.kind=adam"]
    captured = build(load(*adam, "schedule.cuda_graph=dense", "schedule.strict=true"), datasets)
    plain = build(load(*adam, "schedule.cuda_graph=none"), datasets)
    torch.testing.assert_close(losses(captured, batches, 20), losses(plain, batches, 20), rtol=1e-5, atol=1e-7)


def short(batch: Batch, rows: int) -> Batch:
    sparse = batch.sparse
    values = sparse.values.view(sparse.num_features, -1)[:, :rows].reshape(-1)
    bags = replace(sparse, values=values, lengths=sparse.lengths[: values.numel()])
    return Batch(batch.dense[:rows], bags, batch.label[:rows], batch.row_ids[:rows])


@BOTH
def test_a_short_batch_is_launched_plainly(datasets, batches, graph: str, caplog) -> None:  # type: ignore[no-untyped-def]
    captured, plain = both(datasets, graph=graph)
    mixed = [*batches[:7], short(batches[7], 100), *batches[8:12], short(batches[7], 1)]
    with caplog.at_level(logging.WARNING):
        found = losses(captured, mixed, 39)
    torch.testing.assert_close(found, losses(plain, mixed, 39), rtol=1e-5, atol=1e-7)
    said = [record.message for record in caplog.records if "uncaptured" in record.message]
    assert len(said) == 2, "once for each number of rows"


def test_strict_refuses_what_cannot_be_replayed(datasets, batches) -> None:  # type: ignore[no-untyped-def]
    parts = build(load(*EARLY, "schedule.strict=true"), datasets)
    for batch in batches[: WARM_UP_STEPS + 2]:
        parts.step(batch)
    with pytest.raises(UserError, match=r"cannot be replayed: batches of 100 rows, where the captured step has 512"):
        parts.step(short(batches[0], 100))


def bags(batch: Batch, seed: int, most: int) -> Batch:
    """The same rows with bags of 0 to ``most`` ids."""
    generator = torch.Generator().manual_seed(seed)
    sparse = batch.sparse
    lengths = torch.randint(0, most + 1, (sparse.lengths.numel(),), generator=generator, dtype=torch.int32)
    features = torch.arange(sparse.num_features).repeat_interleave(batch.size).repeat_interleave(lengths)
    pool = sparse.values.cpu().view(sparse.num_features, -1)
    picked = pool[features, torch.randint(0, batch.size, (features.numel(),), generator=generator)]
    found = SparseBatch(picked.to(CUDA), lengths.to(CUDA), None, sparse.num_features)
    return Batch(batch.dense, found, batch.label, batch.row_ids)


@BOTH
def test_bags_of_changing_sizes(datasets, batches, graph: str) -> None:  # type: ignore[no-untyped-def]
    """Fewer ids than the capture has room for, and more, which is captured anew; a dense graph holds none."""
    captured, plain = both(datasets, graph=graph)
    most = [5, 5, 5, 6, 3, 1, 9, 4, 2]
    mixed = [bags(batches[number], number, each) for number, each in enumerate(most)]
    torch.testing.assert_close(losses(captured, mixed, 36), losses(plain, mixed, 36), rtol=1e-5, atol=1e-7)


def test_two_captures_live_side_by_side(datasets, batches) -> None:  # type: ignore[no-untyped-def]
    (one, plain), (two, _) = both(datasets), both(datasets)
    schedule = LRSchedule(one.config.optimizer.lr_schedule, 40)
    found: list[list[Tensor]] = [[], []]
    for number in range(40):
        for which, parts in enumerate((one, two)):
            found[which].append(step(parts, batches[number % len(batches)], number, schedule).loss.clone())
    expected = losses(plain, batches, 40)[:, 0]
    for each in found:
        torch.testing.assert_close(torch.stack(each).cpu(), expected, rtol=1e-5, atol=1e-7)


def outputs(output: StepOutput) -> Tensor:
    return torch.stack([output.logit, *output.tower_logits.values(), output.loss.expand_as(output.logit)])


def test_a_thousand_replays_write_every_output(datasets, batches) -> None:  # type: ignore[no-untyped-def]
    """Poisoned before each replay: what it does not write stays nan.

    The host is ahead as in training, with the loader's batches on their way; nothing is learnt, so that each batch has
    its logits, whichever step reads it.
    """
    captured, plain = both(datasets)
    for parts in (captured, plain):
        parts.optimizer.set_lr(0.0)
        parts.model.embeddings.set_lr(0.0)
    expected = [outputs(plain.step(batch)).clone() for batch in batches]
    loaded = (batch for _ in range(1000) for batch in datasets.train.batches(0) if batch.size == ROWS)
    following = prefetch(loaded, CUDA)
    worst = torch.zeros((), device=CUDA)
    for number in range(1000):
        output = captured.step(next(following), measure=number % 100 == 50)
        reference = expected[number % len(expected)]
        worst = torch.maximum(worst, (outputs(output) - reference).abs().max())  # nan where one is
        for value in (output.logit, output.loss, *output.tower_logits.values()):
            value.fill_(math.nan)
    following.close()
    captured.guard.drain()
    assert float(worst) < 1e-4
    assert min(float((one - other).abs().max()) for one, other in pairwise(expected)) > 1e-2, "they can be told apart"


@BOTH
def test_measured_replays_give_norms_and_a_timeline(datasets, batches, graph: str) -> None:  # type: ignore[no-untyped-def]
    captured, plain = both(datasets, graph=graph)
    schedule = LRSchedule(captured.config.optimizer.lr_schedule, 12)
    for number in range(12):
        measure = number % 3 == 2
        output, expected = (step(p, batches[number], number, schedule, measure=measure) for p in (captured, plain))
        assert set(output.grad_norms) == set(expected.grad_norms)
        for block, norm in expected.grad_norms.items():
            torch.testing.assert_close(output.grad_norms[block], norm, rtol=1e-4, atol=1e-7, msg=block)
    intervals = captured.streams.intervals()
    assert [each.op for each in intervals] == [*program(captured.plan)]
    assert [each.op for each in plain.streams.intervals()] == [*program(plain.plan)]
    assert all(0 <= each.start_ms <= each.end_ms for each in intervals)
    spans = {each.op.key: (each.start_ms, each.end_ms) for each in intervals}
    assert spans["lookup"][1] <= spans["over_arch"][0] < spans["over_arch"][1] <= spans["table_update"][0]
    assert overlap_report(intervals, program(captured.plan)).step_ms > 0


@BOTH
def test_no_memory_grows(datasets, batches, graph: str) -> None:  # type: ignore[no-untyped-def]
    captured = build(load("schedule.preset=erase", f"schedule.cuda_graph={graph}"), datasets)
    losses(captured, batches, 50)
    for batch in batches[:2]:  # either held batch has captures of its own
        captured.step(batch, measure=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for number in range(5000):
        captured.step(batches[number % len(batches)], measure=number % 100 == 0)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before[0] + 2**20
    assert torch.cuda.memory_reserved() <= before[1] + 2**22


def test_a_poisoned_loss_ends_the_run_within_the_lag(datasets, batches) -> None:  # type: ignore[no-untyped-def]
    captured = build(load(*EARLY), datasets)
    losses(captured, batches, 8)
    captured.guard.drain()
    bad = replace(batches[0], dense=torch.full_like(batches[0].dense, math.nan), arrived=None)
    captured.step(bad)
    with pytest.raises(UserError, match=r"step 8: the loss of over_arch"):
        losses(captured, batches, LAG_STEPS)

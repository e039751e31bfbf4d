"""Joins engine and content: builds what a configuration names. Shared by the commands that need a model."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from data.dataset import Datasets
from data.registry import SourceCatalog
from erase_rec.api.base_rate import base_rate_of
from erase_rec.autograd_thread import wake_autograd
from erase_rec.batch import Batch, Scores
from erase_rec.checkpoint import CheckpointManager, load
from erase_rec.compiled import Forward, compiled_forwards
from erase_rec.config.catalog import Catalog, Group
from erase_rec.config.schema import Config
from erase_rec.config.types import Params
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.replicas import ReplicaGuard
from erase_rec.distributed.table_plan import ShardingPlan
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.finite import FiniteGuard
from erase_rec.precision import batch_norm_parameters, cast_parameters
from erase_rec.protocols import Embeddings
from erase_rec.run_folder import RunFolder
from erase_rec.schedule.autotune import Tuning, autotune, nothing_learnt
from erase_rec.schedule.gradients import GradientProgram, trained_blocks
from erase_rec.schedule.loss_gradients import all_blocks
from erase_rec.schedule.measured_streams import MeasuredStreams
from erase_rec.schedule.plan import Plan
from erase_rec.schedule.reduction.build import make_reduction
from erase_rec.schedule.reduction.reduction import Blocks
from erase_rec.schedule.replays import CudaReplays
from erase_rec.schedule.step import DENSE_BLOCK, ScheduledStep
from erase_rec.schedule.step_graphs import StepGraphs
from erase_rec.schedule.streams import make_streams
from erase_rec.training_loop import Parts, served_tensors
from eval.evaluator import PooledEvaluator
from eval.progressive import ProgressiveEvaluation
from models.ctr_model import CTRModel, build_local_losses, build_model
from models.embeddings.build import build_embeddings, build_rank_embeddings
from models.registry import ModelCatalog

TUNED_BATCHES = 4
"""Batches that placements are measured on."""


class ContentCatalog:
    """Every registered component; implements :class:`erase_rec.config.catalog.Catalog`."""

    def __init__(self) -> None:
        models, sources = ModelCatalog(), SourceCatalog()
        self._of: dict[Group, Catalog] = {"tower": models, "head": models, "local_loss": models, "source": sources}

    def kinds(self, group: Group) -> Sequence[str]:
        """Names registered in ``group``, sorted."""
        return self._of[group].kinds(group)

    def params_model(self, group: Group, kind: str) -> type[Params]:
        """Schema of ``params`` for ``kind``."""
        return self._of[group].params_model(group, kind)


@dataclass(frozen=True)
class Machine:
    """Where a run computes.

    Attributes:
        device: the device of model and batches.
        dtype: of the towers, the over-arch and the pooled embeddings: ``train.precision``.
    """

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def prepare(cls, config: Config) -> Machine:
        """Applies threads and TF32 and chooses the device; inside :func:`restored_settings`.

        Raises:
            UserError: CUDA is asked for and not here.
        """
        wanted = config.train.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise UserError("train.device: cuda: torch sees no CUDA device here; use train.device=auto or cpu")
        if config.train.threads is not None:
            torch.set_num_threads(config.train.threads)
        precision = "high" if config.train.tf32 else "highest"
        torch.set_float32_matmul_precision(precision)
        on_cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        wake_autograd(device)
        return cls(device, torch.bfloat16 if config.train.precision == "bf16" else torch.float32)

    @property
    def pins(self) -> bool:
        """Whether batches go to page-locked memory, from which copies to the device are asynchronous."""
        return self.device.type == "cuda"

    def name(self) -> str:
        """Name of the device, for results."""
        if self.device.type == "cuda":
            return str(torch.cuda.get_device_name(self.device))
        return f"CPU, {torch.get_num_threads()} threads"

    def peak_memory_gib(self) -> float | None:
        """Most device memory that PyTorch held in this process; None on the CPU."""
        return torch.cuda.max_memory_reserved(self.device) / 2**30 if self.device.type == "cuda" else None


@contextmanager
def restored_settings(*, on_cuda: bool) -> Iterator[None]:
    """Puts back what a run sets for the whole process when the block ends: a notebook goes on as it was.

    These are torch's threads, precision of float32 products and random generators, and the level of the log.
    """
    threads, precision, disabled = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        logging.root.manager.disable,
    )
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_cuda else []):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        logging.disable(disabled)


@contextmanager
def join_ranks(config: Config) -> Iterator[tuple[World, Machine]]:
    """This process among the ranks that ``config`` asks for, and where it computes, until the block ends.

    Raises:
        UserError: see :func:`erase_rec.distributed.launch.join_world` and :meth:`Machine.prepare`.
    """
    on_cuda = config.train.device != "cpu" and torch.cuda.is_available()
    grouped = config.distributed.reduction is not None
    with (
        join_world(on_cuda=on_cuda, timeout_s=config.distributed.timeout_s, grouped=grouped) as world,
        restored_settings(on_cuda=on_cuda),
    ):
        if not world.is_first:
            logging.disable(logging.WARNING)  # the first rank speaks for all; errors are no log records
        yield world, Machine.prepare(config)


def scorer(
    model: CTRModel, machine: Machine, *, terms: bool = False, ablate: bool = False
) -> Callable[[Batch], Scores]:
    """Evaluation forward of ``model`` for batches in host memory, in its precision; see :meth:`CTRModel.score`."""

    def score(batch: Batch) -> Scores:
        if batch.size == 0:  # of a step with fewer rows than ranks, which other ranks score together
            model.embeddings.idle()
            return Scores(batch.label, dict.fromkeys(model.tower_names(), batch.label))
        return model.score(batch.to(machine.device, non_blocking=True), terms=terms, ablate=ablate)

    return score


def trained_model(config: Config, table_rows: Mapping[str, int], checkpoint: Path, machine: Machine) -> CTRModel:
    """The model of a checkpoint, for scoring: in evaluation mode and in the precision of training."""
    embeddings = build_embeddings(config, table_rows, machine.device, machine.dtype)
    model = build_model(config, embeddings, machine.device)
    load(checkpoint, served_tensors(model), subset=True)
    cast_parameters(model, machine.dtype)
    model.train(False)
    return model


def make_optimizer(config: Config, model: CTRModel, plan: Plan, blocks: Blocks, dtype: torch.dtype) -> DenseOptimizer:
    """A block a tower where towers are updated or clipped by themselves, else all dense parameters in one.

    The model computes in ``dtype`` from here on. Comes before the reduction, which keeps dtype and memory in mind.
    """
    apart = plan.optimizer == "per_tower" or config.optimizer.dense.clip == "per_tower"
    trained = {name: parameter for named in blocks.values() for name, parameter in named.items()}
    every = {name: parameter for named in all_blocks(model, plan).values() for name, parameter in named.items()}
    return DenseOptimizer(
        config.optimizer.dense,
        blocks if apart else {DENSE_BLOCK: trained},
        dtype=dtype,
        untrained={name: parameter for name, parameter in every.items() if name not in trained},
        in_float32=batch_norm_parameters(model),
    )


def _compiled_forwards(config: Config, model: CTRModel, machine: Machine, world: World) -> dict[str, Forward]:
    def say(sentence: str) -> None:
        if world.is_first:
            typer.echo(sentence, err=True)

    if not config.model.compile:
        return {}
    return compiled_forwards(model, config.train.local_batch_size, config.train.micro_batches, machine.device, say)


def build_parts(
    config: Config,
    datasets: Datasets,
    folder: RunFolder,
    machine: Machine,
    world: World,
    *,
    embeddings: Embeddings | None = None,
    tuning: Tuning | None = None,
    tune_on: Sequence[Batch] = (),
) -> Parts:
    """Everything that the trainer needs, with initial weights.

    Args:
        config: checked.
        datasets: rows to train on and to evaluate on.
        folder: where checkpoints go.
        machine: where to compute.
        world: the ranks.
        embeddings: tables of another model of this configuration and world, to be shared; None: new ones.
        tuning: what ``schedule.autotune`` chose before; None: it is measured where it is asked for.
        tune_on: full batches on the device to measure on; none: the first of the training rows.
    """
    torch.manual_seed(config.seed + world.rank)  # dropout; initial weights have generators of their own
    sharding: ShardingPlan | None = None
    if embeddings is None:
        embeddings, sharding = build_rank_embeddings(config, datasets.table_rows, machine.device, machine.dtype, world)
    model = build_model(config, embeddings, machine.device)
    plan = Plan.from_config(config, world.size)
    blocks = trained_blocks(model, plan)
    optimizer = make_optimizer(config, model, plan, blocks, machine.dtype)
    forwards = _compiled_forwards(config, model, machine, world)
    timeout_s = config.distributed.timeout_s if world.size > 1 else None
    guard = FiniteGuard(datasets.train.locate, timeout_s=timeout_s)
    names = model.tower_names()
    metrics = ProgressiveEvaluation(names, machine.device, world)

    def make_step(
        plan: Plan, guard: FiniteGuard, metrics: ProgressiveEvaluation
    ) -> tuple[ScheduledStep, MeasuredStreams]:
        streams = MeasuredStreams(make_streams(plan.streams(), machine.device, plan.preferred()), machine.device)
        gradients = GradientProgram(
            model,
            plan,
            build_local_losses(config),
            streams,
            device=machine.device,
            reduction=make_reduction(plan, blocks, world, streams, chunk_mib=config.distributed.bucket_mib),
            forwards=forwards,
        )
        graphs = None
        if plan.cuda_graph in {"dense", "step"} and machine.device.type == "cuda":
            strict = config.schedule.strict
            replays = CudaReplays(machine.device)
            world.captures.add(replays)
            graphs = StepGraphs(replays, streams, embeddings, world.collectives, holds=plan.cuda_graph, strict=strict)
        max_norm = config.optimizer.dense.max_grad_norm
        return ScheduledStep(gradients, optimizer, guard, max_norm, metrics=metrics, graphs=graphs), streams

    if tuning is None and config.schedule.autotune and machine.device.type == "cuda":
        batches = tune_on or _full_batches(datasets, machine, world)
        tuning = _tune(plan, batches, datasets, machine, world, model, optimizer, make_step)
    if tuning is not None:
        plan = tuning.choice.of(plan)
    step, streams = make_step(plan, guard, metrics)
    return Parts(
        config=config,
        world=world,
        model=model,
        plan=plan,
        streams=streams,
        step=step,
        optimizer=optimizer,
        guard=guard,
        score=scorer(model, machine, terms=True),
        train_loader=datasets.train,
        eval_loader=datasets.eval,
        evaluator=PooledEvaluator(
            names, world, base_rate_of(config, datasets.train.base_rate, metrics.recent_base_rate)
        ),
        metrics=metrics,
        replicas=ReplicaGuard(world, model, config.distributed.check_every, optimizer.masters()),
        checkpoints=CheckpointManager(
            folder.checkpoints,
            config.train.keep_checkpoints,
            world,
            in_background=config.train.checkpoint_async,
            timeout_s=config.distributed.timeout_s,
        ),
        data_fingerprint=datasets.fingerprint,
        tuning=tuning,
        sharding=sharding,
    )


def _full_batches(datasets: Datasets, machine: Machine, world: World) -> list[Batch]:
    """Some full batches of the training rows, on the device."""
    first = datasets.train.batches(0)
    main = torch.cuda.current_stream(machine.device)
    found = [batch.to(machine.device).arriving(main) for batch in itertools.islice(first, TUNED_BATCHES)]
    first.close()  # type: ignore[attr-defined]  # stops the loader's threads
    return [batch for batch in found if batch.size * world.size == datasets.train.global_batch_size]


def _tune(
    plan: Plan,
    batches: Sequence[Batch],
    datasets: Datasets,
    machine: Machine,
    world: World,
    model: CTRModel,
    optimizer: DenseOptimizer,
    make_step: Callable[[Plan, FiniteGuard, ProgressiveEvaluation], tuple[ScheduledStep, MeasuredStreams]],
) -> Tuning | None:
    """Measures placements on ``batches``; None where there are none."""
    if not batches:
        return None

    def trial(plan: Plan) -> tuple[ScheduledStep, MeasuredStreams]:
        throwaway = ProgressiveEvaluation(model.tower_names(), machine.device, world)
        return make_step(plan, FiniteGuard(datasets.train.locate), throwaway)

    with nothing_learnt(model, optimizer, machine.device):
        return autotune(plan, batches, trial, world)

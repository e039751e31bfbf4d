"""The training loop: batches in, steps, logs, evaluations, checkpoints; stops for good reasons only."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from erase_rec import checkpoint
from erase_rec.batch import Batch, Scores
from erase_rec.best_metric import BestMetric
from erase_rec.callbacks import CallbackError, Callbacks
from erase_rec.checkpoint.stalls import Stalls
from erase_rec.config.schema import Config
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.distributed.replicas import ReplicaGuard, RunningStatistics
from erase_rec.distributed.shards import Held, Shards
from erase_rec.distributed.staggering import Staggering
from erase_rec.distributed.stop import Stopped
from erase_rec.distributed.table_plan import ShardingPlan
from erase_rec.distributed.world import World
from erase_rec.early_stopping import EarlyStopping
from erase_rec.errors import UserError
from erase_rec.finite import FiniteGuard
from erase_rec.health import health_warnings, tower_warnings
from erase_rec.log_interval import ends_interval, is_logged
from erase_rec.lr_schedule import LRSchedule
from erase_rec.position import Position, planned_steps
from erase_rec.prefetch import prefetch
from erase_rec.progress import Progress
from erase_rec.protocols import BatchLoader, CTRModel, EvalResult, Evaluator, ProgressiveMetrics, TrainStep
from erase_rec.random_state import RandomState
from erase_rec.run_log import RunLog, eval_scalars
from erase_rec.schedule.autotune import Tuning
from erase_rec.schedule.measured_streams import MeasuredStreams
from erase_rec.schedule.overlap import OverlapReport, overlap_report
from erase_rec.schedule.plan import Plan
from erase_rec.schedule.program import program
from erase_rec.step_timeline import StepTimeline
from erase_rec.throughput import StepTimer, clock_for

JUDGED_ROWS = 2_000
"""A window of fewer rows says little: there the standard error of NE is some percent."""
JUDGED_FROM = 4
"""A model may be no better than a constant in the first quarter of its steps."""
METRICS = "metrics/"
"""What the names of the progressive metrics' sums start with in checkpoints."""
BEST_METRIC = "eval.ne"
"""What marks the best checkpoint where early stopping watches nothing else."""


@dataclass(frozen=True)
class Parts:
    """What a training run is made of, built by a composition root."""

    config: Config
    world: World
    model: CTRModel
    plan: Plan
    streams: MeasuredStreams
    step: TrainStep
    optimizer: DenseOptimizer
    guard: FiniteGuard
    score: Callable[[Batch], Scores]
    train_loader: BatchLoader
    eval_loader: BatchLoader | None
    evaluator: Evaluator
    metrics: ProgressiveMetrics
    replicas: ReplicaGuard
    checkpoints: checkpoint.CheckpointManager
    data_fingerprint: str
    tuning: Tuning | None = None
    sharding: ShardingPlan | None = None


@dataclass
class TrainingLoop:
    """Runs the loop, on every rank alike. What a resumed run needs to go on bit for bit is in its checkpoints.

    Attributes:
        parts: what it trains.
        log: what it logs to; the first rank alone writes.
        progress: what it shows progress on, likewise.
        callbacks: who is told of what happens, likewise.
        position: where it starts, and where it is.
        last_eval: the newest evaluation of this process.
        overlap: of the last logged step.
        timeline: of the last logged step of this process that had a whole batch, if any had.
        grad_norms: of each tower in the last logged step, before clipping.
    """

    parts: Parts
    log: RunLog
    progress: Progress
    callbacks: Callbacks
    position: Position = field(default_factory=Position)
    last_eval: EvalResult | None = None
    overlap: OverlapReport | None = None
    timeline: StepTimeline | None = None
    grad_norms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Derives the loop's state from the configuration."""
        config = self.parts.config
        train = config.train
        watches = train.early_stopping is not None or config.optimizer.lr_schedule.kind == "plateau"
        if watches and self.parts.eval_loader is None:
            raise UserError(
                "train.early_stopping and optimizer.lr_schedule.kind: plateau need held-out rows; "
                "name them with data.eval=PATH or data.eval_fraction=0.1"
            )
        self.total_steps = planned_steps(train, self.parts.train_loader, self.position)
        self._lr_schedule = LRSchedule(config.optimizer.lr_schedule, self.total_steps)
        self._early_stopping = EarlyStopping(train.early_stopping) if train.early_stopping else None
        self._best = BestMetric(train.early_stopping.metric if train.early_stopping else BEST_METRIC)
        self._device = self.parts.step.device()
        self.timer = StepTimer(clock_for(self._device), train.warmup_qps_steps)
        self._stalls = Stalls(clock_for(self._device))
        self._said: set[str] = set()
        self._stop = False
        self._random = RandomState(self.parts.world, self._device)
        self._statistics = RunningStatistics(self.parts.world, self.parts.model)
        self._evaluated_step = self._saved_step = -1
        self._evaluation_is_due = False
        self._staggering = Staggering(self.parts.world)

    def resume(self, path: Path) -> None:
        """Continues from the checkpoint at ``path``, whose position the trainer was made with.

        On another number of ranks than the checkpoint's, too: the epoch's order is the same, and its rows that no step
        has had yet are shared anew.
        """
        state = checkpoint.read_state(path)
        ranks = state["ranks"]
        tensors: dict[str, Held] = {**checkpoint_tensors(self.parts), **self._random.empty(ranks)}
        checkpoint.load(path, tensors, world=self.parts.world)
        tell_of_loaded(self.parts, tensors)
        whole = {name: value for name, value in tensors.items() if not isinstance(value, Shards)}
        metrics = {name.removeprefix(METRICS): value for name, value in whole.items() if name.startswith(METRICS)}
        self.parts.metrics.load_state_dict(metrics)
        self._lr_schedule.load_state_dict(state["lr_schedule"])
        self._best.load_state_dict(state["best"])
        if self._early_stopping is not None and state["early_stopping"] is not None:
            self._early_stopping.load_state_dict(state["early_stopping"])
            self._stop = self._early_stopping.exhausted
        self._evaluated_step = state["evaluated_step"]
        self.grad_norms = state["grad_norms"]
        self._evaluation_is_due = state.get("evaluation_is_due", False)
        self._saved_step = -1 if self._evaluation_is_due else self.position.step
        self.parts.guard.step = self.position.step
        self._random.restore(whole, ranks)

    def fit(self) -> Literal["completed", "stopped_early"]:
        """Trains to the end.

        Returns:
            ``completed`` or ``stopped_early``.

        Raises:
            Stopped: it was told to end; a checkpoint of this place was written.
        """
        if self.parts.world.size > 1:
            self.parts.replicas.check(self.position.step)
        try:
            self._train()
            self._conclude()
        except Stopped:
            self._save_in_time()
            raise
        except CallbackError:
            if self.parts.world.size == 1:  # a checkpoint is gathered from all ranks, and the others know nothing yet
                self._save_in_time()
            raise
        finally:
            self.parts.checkpoints.settle(self.parts.config.distributed.timeout_s)
        self.callbacks.tell(self.position.step, self.position.epoch)
        if self.last_eval is None and self.parts.eval_loader is not None:
            self.last_eval = self.evaluate()  # resumed after the last evaluation: the same rows, the same result
        for sentence in [] if self.last_eval is None else tower_warnings(self.last_eval):
            self.progress.message(f"warning: {sentence}")
        return "stopped_early" if self._stop else "completed"

    def _train(self) -> None:
        """Every step that is left."""
        position = self.position
        embeddings, spread = self.parts.model.embeddings, self.parts.sharding is not None
        batches = prefetch(
            self.parts.train_loader.batches(position.epoch, position.epoch_rows, endless=True),
            self._device,
            expect=embeddings.expect if spread else None,
            count=self.total_steps - position.step,
        )
        try:
            self.callbacks.state.total_steps = self.total_steps
            self.callbacks.start(position.step, position.epoch)
            self.timer.resume()
            if self._evaluation_is_due:
                self._evaluate()
            while not self._finished():
                with self.timer.waiting():
                    batch = next(batches)
                self._train_on(batch)
                self.parts.world.stop.passed()
            if spread:
                embeddings.expect(None)  # of a run that stops early; every rank does at the same step
        finally:
            batches.close()  # stops the loader's threads

    def _conclude(self) -> None:
        """What is due after the last step."""
        if self.parts.world.size > 1 and not self.parts.replicas.is_due(self.position.step):
            self._compare_replicas()
        self._evaluate()
        self._save()
        with self._stalls.standing_still(saves=0):
            self.parts.checkpoints.finish()
        self._tell_of_checkpoints()
        if (sentence := self._stalls.sentence()) is not None:
            self.progress.message(sentence)

    def _tell_of_checkpoints(self) -> None:
        """Lets callbacks know what was published; what a write beside training met ends the run here."""
        for path in self.parts.checkpoints.published():
            self.callbacks.checkpoint(path)

    def _finished(self) -> bool:
        return self._stop or self.position.step >= self.total_steps

    def _train_on(self, batch: Batch) -> None:
        config, rows = self.parts.config, batch.size * self.parts.world.size
        position = self.position.normal(self.parts.train_loader)
        self.parts.world.collectives.step = position.step
        factor = self._lr_schedule.factor(position.step)
        self.parts.optimizer.set_lr(config.optimizer.dense.lr * factor)
        self.parts.model.embeddings.set_lr(config.optimizer.sparse.lr * factor)
        logged = self._is_logged(position.step + 1)
        with self._staggering.step():
            output = self.parts.step(batch, measure=logged)
        self._statistics.average()
        self.position = position = position.after(rows)
        self.timer.step(rows)
        self.progress.advance(position.step)
        if self.parts.replicas.is_due(position.step):
            self._compare_replicas()
        if logged:
            self._log(factor, output.grad_norms, batch.size)
        # Evaluation comes first: what it changes (early stopping, plateau, best) belongs into this step's checkpoint.
        if self._is_due(config.train.eval_every_steps):
            self._evaluate()
        if config.train.checkpoint_every_steps and position.step % config.train.checkpoint_every_steps == 0:
            self._save()
        self._tell_of_checkpoints()
        self.callbacks.step()
        self._tell(logged)

    def _tell(self, logged: bool) -> None:
        """Lets callbacks end the run: at once where there is one rank, else where all ranks meet to log."""
        callbacks, state, world = self.callbacks, self.callbacks.state, self.parts.world
        callbacks.tell(self.position.step, self.position.epoch)
        if callbacks.callbacks and world.size > 1 and logged:
            state.stop_reason = world.broadcast_object("callbacks", state.stop_reason)
        if state.stop_reason is not None and (world.size == 1 or logged):
            self._stop = True
            self.progress.message(f"stopped at step {self.position.step}: {state.stop_reason}")

    def _verify(self) -> None:
        """Meets what was left to the device: losses that are not finite, ids outside their tables."""
        self.parts.guard.drain()
        self.parts.model.embeddings.verify()

    def _compare_replicas(self) -> None:
        self.timer.pause()
        self._verify()
        self.parts.replicas.check(self.position.step)
        self.timer.resume()

    def _is_due(self, every_steps: int | None) -> bool:
        """Whether this step ends a period of ``every_steps``, or an epoch where that is None."""
        if every_steps is None:
            return self.position.ends_epoch(self.parts.train_loader)
        return self.position.step % every_steps == 0

    def _is_logged(self, step: int) -> bool:
        return is_logged(step, self.parts.config.train.log_every_steps, self.total_steps)

    def _log(self, factor: float, grad_norms: Mapping[str, Tensor], rows: int) -> None:
        config, step = self.parts.config, self.position.step
        self.timer.pause()
        self._verify()
        # One that the run's end cuts short stays open: a longer run that goes on from here adds up in the same order.
        window = self.parts.metrics.window(closes=ends_interval(step, config.train.log_every_steps))
        ops = program(self.parts.plan.of_step(step - 1))
        intervals = self.parts.streams.intervals()
        self.overlap = overlap_report(intervals, ops)
        if self.timeline is None or rows == config.train.local_batch_size:
            self.timeline = StepTimeline(step, rows, intervals, self.overlap.critical_path)
        values = window | self.timer.window().scalars() | self.overlap.scalars() | self._stalls.scalars()
        reduced_ms = sum(each.duration_ms for each in intervals if each.op.kind == "reduce")
        values |= self._staggering.scalars(reduced_ms if self._device.type == "cuda" else None)
        values["lr/dense"] = config.optimizer.dense.lr * factor
        values["lr/sparse"] = config.optimizer.sparse.lr * factor
        for block, norm in grad_norms.items():
            tower = block in self.parts.model.tower_names()
            values[f"tower/{block}/grad_norm" if tower else f"{block}/grad_norm"] = float(norm)
            if tower:
                self.grad_norms[block] = float(norm)
        self.log.scalars(step, values)
        self.progress.report(step, values)
        self.callbacks.log(values)
        window_rows = config.train.log_every_steps * self.parts.train_loader.global_batch_size
        judged = window_rows >= JUDGED_ROWS and step >= self.total_steps // JUDGED_FROM
        if judged and step >= 2 * config.optimizer.lr_schedule.warmup_steps:
            for sentence in health_warnings(self._judged(window)):
                if sentence not in self._said:
                    self._said.add(sentence)
                    self.progress.message(f"warning: step {step}: {sentence}")
        self.timer.resume()

    def _judged(self, window: Mapping[str, float]) -> dict[str, float]:
        """Metrics that can be bad: under the ``joint`` target a tower's logit is a term of a sum, no prediction."""
        joint = {tower.name for tower in self.parts.config.towers if tower.loss and tower.loss.target == "joint"}
        return {tag: value for tag, value in window.items() if tag not in {f"tower/{name}/ne" for name in joint}}

    def _evaluate(self) -> None:
        """Scores the held-out rows once a step number, and lets plateau, early stopping and best see the result."""
        if self.parts.eval_loader is None or self._evaluated_step == self.position.step:
            return
        self.timer.pause()
        self._verify()
        self._evaluation_is_due = True  # of a checkpoint that is written because somebody ends the run here
        result = self.last_eval = self.evaluate()
        self._evaluated_step, self._evaluation_is_due = self.position.step, False
        scalars = eval_scalars(result)
        self.log.scalars(self.position.step, scalars)
        self.log.flush()
        self.progress.report(self.position.step, scalars)
        watched = {tag.replace("/", "."): value for tag, value in scalars.items()}
        if self._lr_schedule.watched_metric is not None:
            self._lr_schedule.observe(watched[self._lr_schedule.watched_metric])
        if self._early_stopping is not None and self._early_stopping.observe(watched[self._early_stopping.metric]):
            self._stop = True
        is_best = self._best.observe(watched[self._best.metric])
        self.callbacks.evaluation(result)
        if is_best or self.parts.config.train.checkpoint_every_steps is None:
            self._save(is_best=is_best)
        self.timer.resume()

    def evaluate(self, keep_scores: bool = False) -> EvalResult:
        """Scores the held-out rows with the present parameters.

        Raises:
            Stopped: the run was told to end, between two batches.
        """
        self.parts.model.train(False)
        try:
            with torch.no_grad(), closing(self._held_out()) as batches:
                result = self.parts.evaluator.evaluate(self.parts.score, batches, keep_scores=keep_scores)
        finally:
            self.parts.model.train(True)
        self.parts.model.embeddings.verify()
        return result

    def _held_out(self) -> Generator[Batch]:
        """The held-out batches; the run can stop after each."""
        assert self.parts.eval_loader is not None
        for batch in self.parts.eval_loader.batches(0):
            yield batch
            self.parts.world.stop.passed()

    def _save_in_time(self) -> None:
        """Saves this place where the run is to end soon: no disk is waited for longer than another rank would be."""
        self.parts.checkpoints.finish(self.parts.config.distributed.timeout_s)
        self._save()
        self.parts.checkpoints.finish(self.parts.config.distributed.timeout_s)

    def _save(self, *, is_best: bool = False) -> None:
        if self._saved_step == self.position.step and not is_best:
            return
        self.timer.pause()
        self._verify()
        self.log.flush()
        state: dict[str, Any] = {
            "position": asdict(self.position.normal(self.parts.train_loader)),
            "lr_schedule": self._lr_schedule.state_dict(),
            "best": self._best.state_dict(),
            "early_stopping": self._early_stopping.state_dict() if self._early_stopping else None,
            "evaluated_step": self._evaluated_step,
            "evaluation_is_due": self._evaluation_is_due,
            "grad_norms": self.grad_norms,
            "data_fingerprint": self.parts.data_fingerprint,
            "ranks": self.parts.world.size,
        }
        tensors: dict[str, Held] = {**checkpoint_tensors(self.parts), **self._random.tensors()}
        with self._stalls.standing_still():
            self.parts.checkpoints.save(self.position.step, tensors, state, is_best=is_best)
        self._saved_step = self.position.step
        self.timer.resume()


def checkpoint_tensors(parts: Parts) -> dict[str, Held]:
    """Every tensor of a run but the generators', by a name that depends on no schedule, backend or plan; collective.

    They share storage with what they are of. Whoever loads into them then tells the optimizer (``refresh``).
    """
    embeddings = parts.model.embeddings
    return served_tensors(parts.model) | {
        **{f"model/{name}": value for name, value in parts.optimizer.masters().items()},
        **{
            f"table_optimizer/{table}/{name}": value
            for table, entries in embeddings.optimizer_state().items()
            for name, value in entries.items()
        },
        **{f"optimizer/{name}": value for name, value in parts.optimizer.state().items()},
        **{f"{METRICS}{name}": value for name, value in parts.metrics.state_dict().items()},
    }


def tell_of_loaded(parts: Parts, tensors: Mapping[str, Held]) -> None:
    """Lets model and optimizers take over what was written into :func:`checkpoint_tensors`."""
    parts.optimizer.refresh()
    # Not every table optimizer shares its state's storage: FBGEMM keeps the iteration to itself.
    parts.model.embeddings.load_optimizer_state(
        {
            table: {name: tensors[f"table_optimizer/{table}/{name}"] for name in entries}
            for table, entries in parts.model.embeddings.optimizer_state().items()
        }
    )


def served_tensors(model: CTRModel) -> dict[str, Held]:
    """Tensors that predictions depend on, by checkpoint name; share storage with the model.

    Those of a model in training are to be replaced by the optimizer's masters: checkpoints are float32 throughout.
    """
    tensors: dict[str, Held] = {f"model/{name}": value for name, value in model.dense_state().items()}
    return tensors | {f"tables/{name}": value for name, value in model.embeddings.tables().items()}

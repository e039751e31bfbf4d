"""One training run, from its data to its summary: what ``Trainer.fit`` and so ``erase-rec train`` do."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from data.dataset import Datasets, load_features
from data.sources.paths import absolute
from erase_rec import environment
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts, join_ranks
from erase_rec.api.base_rate import base_rate_said
from erase_rec.api.config import Config
from erase_rec.api.introduction import introduction
from erase_rec.api.restart import begun_run, job_entry, same_data
from erase_rec.api.warm_start import WarmStart, warm_start
from erase_rec.callbacks import Callback, CallbackError, Callbacks, RunState
from erase_rec.checkpoint import CheckpointManager, read_state
from erase_rec.config import schema
from erase_rec.config.load import config_hash, dump_config, load_config
from erase_rec.distributed.stop import Stopped
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.position import Position, planned_steps
from erase_rec.progress import Progress, show_progress
from erase_rec.run_folder import RunFolder
from erase_rec.run_log import FileRunLog, RunLog, final_scalars
from erase_rec.schedule.audit import startup_audit
from erase_rec.schedule.autotune import Tuning
from erase_rec.schedule.overlap import OverlapReport
from erase_rec.summary import (
    DataSummary,
    EvalSummary,
    Status,
    Summary,
    ThroughputSummary,
    TowerSummary,
    TrainSummary,
    summarize_eval,
)
from erase_rec.training_loop import Parts, TrainingLoop
from models.ctr_model import build_local_losses

RESUMABLE = (
    *("train.", "eval.", "data.workers", "data.reading", "data.prepared"),
    *("embedding.sharding", "embedding.tables", "schedule.cuda_graph"),
)
"""Sections and keys that may change when a run is resumed: no batch depends on them ..."""
FIXED = ("train.local_batch_size", "train.precision", "train.device", "train.init_from")
"""... without these: the data position or the numbers depend on them."""
LAST_WRITE_S = 20.0
"""Time that a checkpoint which is being written has once another rank has failed; launchers kill after 30."""


@dataclass
class Run:
    """A run and what is known of it so far; on every rank alike.

    Attributes:
        open_data: builds the datasets of a configuration, with the options of :func:`data.dataset.build_datasets`.
        callbacks: who is told of what happens.
        shows: whether it shows what it does.
        folder: its folder, once the first rank has chosen it.
        summary: what it came to, once it has ended in whatever way.
        overlap: of the last logged step.
        bayes_ne: the best NE that the held-out rows allow, where it is known.
        is_first: whether this is the first rank.
    """

    open_data: Callable[..., Datasets]
    callbacks: Sequence[Callback]
    shows: bool
    folder: RunFolder | None = None
    summary: Summary | None = None
    overlap: OverlapReport | None = None
    bayes_ne: float | None = None
    is_first: bool = True

    def start(self, written: Config) -> None:
        """Trains anew, or goes on where torchrun has started the ranks of this job again.

        The folder is made once the data have been read and the model is built, so that a mistake leaves none behind.
        """
        resolved = written.resolved()
        config = _with_absolute_paths(resolved)
        with join_ranks(config) as (world, machine):
            path = begun = begun_run(config, world)
            if world.is_first and begun is None:
                where = config.run
                path = RunFolder.choose(
                    Path(where.dir), where.name, config_name=written.name, config_hash=config_hash(resolved)
                ).path
            path, goes_on = world.broadcast_object("run_folder", (path, begun is not None))
            assert path is not None
            folder = RunFolder(path)
            if goes_on:
                self._go_on(folder, config, machine, world)
                return
            datasets = self.open_data(config, rank=world.rank, world_size=world.size, pin=machine.pins)
            same_data(datasets, world)
            parts = _parts(config, folder, datasets, machine, world)
            warmed = _warmed(parts, datasets)
            if world.is_first:
                record = {"command": shlex.join(sys.argv), "data_fingerprint": datasets.fingerprint} | job_entry()
                with folder.made() as beginning:
                    datasets.features.save(beginning.features)
                    datasets.write_quarantine(beginning.path)
                    beginning.write_environment(environment.describe() | record | {"seed": str(config.seed)})
                    beginning.write_config(dump_config(config))
                    if warmed is not None:
                        warmed.write(beginning)
            self._train(parts, folder, datasets, machine, start=None, notes=_notes(warmed))

    def resume(self, path: Path, overrides: Sequence[str]) -> None:
        """Continues the run of a folder from its newest whole checkpoint; without one from the first step.

        Raises:
            UserError: it is no run, its data have changed, or an override would change what it learns.
        """
        for override in overrides:
            key = override.partition("=")[0]
            if key.startswith(FIXED) or not key.startswith(RESUMABLE):
                raise UserError(f"--resume: {key} cannot change in a resumed run; start a new run with --config")
        folder = RunFolder.open(path)
        config = _with_absolute_paths(load_config(folder.config, overrides, catalog=ContentCatalog()).config)
        with join_ranks(config) as (world, machine):
            self._go_on(folder, config, machine, world)

    def _go_on(self, folder: RunFolder, config: schema.Config, machine: Machine, world: World) -> None:
        datasets = self.open_data(
            config,
            features=load_features(folder.features),
            rank=world.rank,
            world_size=world.size,
            pin=machine.pins,
        )
        same_data(datasets, world)
        recorded = folder.read_environment()["data_fingerprint"]
        if recorded != datasets.fingerprint:
            raise UserError(
                f"--resume: the data are not those of the run: their fingerprint is {datasets.fingerprint[:12]}, "
                f"the run read {recorded[:12]}; restore the files, or start a new run with --config {folder.config}"
            )
        start, notes = _newest_checkpoint(folder, config, world)
        parts = _parts(config, folder, datasets, machine, world)
        warmed = _warmed(parts, datasets) if start is None else None
        if world.is_first:
            folder.write_config(dump_config(config))
            if warmed is not None:
                warmed.write(folder)
        self._train(parts, folder, datasets, machine, start=start, notes=[*notes, *_notes(warmed)])

    def _train(
        self,
        parts: Parts,
        folder: RunFolder,
        datasets: Datasets,
        machine: Machine,
        *,
        start: Path | None,
        notes: list[str],
    ) -> None:
        """Trains, and leaves logs and a summary whatever happens; the first rank alone writes and speaks."""
        config, world = parts.config, parts.world
        self.folder, self.is_first, self.bayes_ne = folder, world.is_first, datasets.bayes_ne
        if parts.sharding is not None and world.is_first:
            parts.sharding.write(folder.sharding_plan)
        if parts.tuning is not None and not folder.autotune.exists() and world.is_first:
            folder.autotune.write_text(parts.tuning.model_dump_json(indent=2) + "\n", encoding="utf-8")
        position = Position() if start is None else Position(**read_state(start)["position"])
        total = planned_steps(config.train, datasets.train, position)
        if position.epoch_rows and (dropped := datasets.train.dropped_rows(position.epoch_rows)):
            notes = [*notes, f"{dropped} of the rows that are left of epoch {position.epoch + 1} are left out of it"]
        with folder.writing(), ExitStack() as stack:
            log = stack.enter_context(
                FileRunLog(folder.path, purge_step=position.step + 1) if world.is_first else RunLog()
            )
            speaks = self.shows and world.is_first
            progress = stack.enter_context(show_progress(total, position.step) if speaks else Progress())
            placement = [] if parts.tuning is None else [parts.tuning.sentence()]
            spread = [] if parts.sharding is None else [parts.sharding.text()]
            for message in (*introduction(config, datasets, folder, machine, world), *spread, *placement, *notes):
                progress.message(message)
            log.text("ne", base_rate_said(config))
            log.text("config", f"```yaml\n{dump_config(config)}```")
            log.hparams(config)
            if position.step < total:
                progress.message(_audit(parts, machine, log, position))
            callbacks = Callbacks(self.callbacks, RunState(config, folder.path), world.is_first)
            loop = TrainingLoop(parts, log, progress, callbacks, position)
            self._fit(loop, datasets, folder, start)
            assert self.summary is not None
            log.final(loop.position.step, final_scalars(self.summary, machine.peak_memory_gib()))
            if loop.overlap is not None:
                log.text("overlap", loop.overlap.as_markdown())
            if loop.timeline is not None and world.is_first:
                loop.timeline.write(folder.path)
        if config.eval.scores and parts.eval_loader is not None:
            scores = loop.evaluate(keep_scores=True).scores
            if world.is_first:
                pq.write_table(scores, folder.scores)

    def _fit(self, loop: TrainingLoop, datasets: Datasets, folder: RunFolder, start: Path | None) -> None:
        """Trains to the end; the first rank leaves a summary whatever happens to whichever rank."""
        world, progress = loop.parts.world, loop.progress

        def last_words() -> None:
            progress.close()
            _summarize(loop, datasets, "failed").write(folder.path)
            loop.parts.checkpoints.settle(LAST_WRITE_S)

        world.last_words = last_words
        status: Status = "failed"
        try:
            if start is not None:
                loop.resume(start)
            with world.stop.listening():
                status = loop.fit()
        except KeyboardInterrupt as told:
            status = "interrupted"
            at = f"{told} after step {loop.position.step}" if isinstance(told, Stopped) else "interrupted"
            progress.message(f"{at}; continue with: python train.py --resume {folder.path}")
            raise
        finally:
            world.last_words = progress.close
            self.summary, self.overlap = _summarize(loop, datasets, status), loop.overlap
            if world.is_first:
                self.summary.write(folder.path)
            _tell_of_the_end(loop.callbacks, self.summary, sys.exc_info()[1])


def _tell_of_the_end(callbacks: Callbacks, summary: Summary, raised: BaseException | None) -> None:
    """Calls the last hooks; what they raise does not stand in for what ended the run."""
    try:
        callbacks.end(summary)
    except CallbackError as error:
        if raised is None:
            raise
        raised.add_note(str(error))


def _parts(config: schema.Config, folder: RunFolder, datasets: Datasets, machine: Machine, world: World) -> Parts:
    """What the run trains, with initial weights, and placed as an earlier start of it was."""
    tuned = Tuning.model_validate_json(folder.autotune.read_bytes()) if folder.autotune.exists() else None
    return build_parts(config, datasets, folder, machine, world, tuning=tuned)


def _warmed(parts: Parts, datasets: Datasets) -> WarmStart | None:
    """Lets the model begin with what ``train.init_from`` names; None: with nothing."""
    wanted = parts.config.train.init_from
    return None if wanted is None else warm_start(wanted, parts, datasets.features, parts.world)


def _notes(warmed: WarmStart | None) -> list[str]:
    return [] if warmed is None else [warmed.text()]


def _newest_checkpoint(folder: RunFolder, config: schema.Config, world: World) -> tuple[Path | None, list[str]]:
    """The checkpoint that the first rank finds, and what is to be said of it."""
    found: tuple[Path | None, list[str]] = (None, [])
    if world.is_first:
        checkpoints = CheckpointManager(folder.checkpoints, config.train.keep_checkpoints)
        checkpoints.recover()
        found = checkpoints.latest()
        if found[0] is not None:
            checkpoints.name_again(found[0])
    start, notes = world.broadcast_object("checkpoint", found)
    return start, [*notes, f"resuming from {start or 'the first step'}"]


def _with_absolute_paths(config: schema.Config) -> schema.Config:
    """Data and the run to begin with, by paths that a resumed run finds from any folder."""
    data, train = config.data, config.train
    paths = {split: tuple(absolute(path) for path in getattr(data, split)) for split in ("train", "eval")}
    prepared = None if data.prepared is None else absolute(data.prepared)
    if (source := train.init_from) is not None:
        train = train.model_copy(update={"init_from": source.model_copy(update={"path": absolute(source.path)})})
    return config.model_copy(update={"data": data.model_copy(update={**paths, "prepared": prepared}), "train": train})


def _audit(parts: Parts, machine: Machine, log: RunLog, position: Position) -> str:
    """Finds which loss trains what on the batch that comes first, logs it, and says the verdict.

    Raises:
        UserError: a detached tower would never be trained.
    """
    batches = parts.train_loader.batches(position.epoch, position.epoch_rows, endless=True)
    batch = next(batches).to(machine.device)
    batches.close()  # type: ignore[attr-defined]  # stops the loader's threads
    report = startup_audit(parts.model, parts.plan, build_local_losses(parts.config), batch, log)
    return "\n".join(report.verdict())


def _summarize(loop: TrainingLoop, datasets: Datasets, status: Status) -> Summary:
    """Collective where training came to its end; else, with several ranks, without what needs the others."""
    ranks, global_batch_size = loop.parts.world.size, datasets.train.global_batch_size
    throughput, ne = ThroughputSummary(global_batch_size=global_batch_size, ranks=ranks), math.nan
    if ranks == 1 or status in {"completed", "stopped_early"}:
        throughput = ThroughputSummary.of(loop.timer.total(), global_batch_size, ranks)
        ne = loop.parts.metrics.lifetime()["train/ne"]
    evaluation: EvalSummary = EvalSummary()
    towers: dict[str, TowerSummary] = {}
    if loop.last_eval is not None:
        evaluation, towers = summarize_eval(loop.last_eval, loop.grad_norms)
    position = loop.position
    return Summary(
        status=status,
        eval=evaluation,
        towers=towers,
        throughput=throughput,
        train=TrainSummary(steps=position.step, rows=position.rows, ne=ne),
        data=DataSummary(
            fingerprint=datasets.fingerprint, unseen_share=datasets.unseen_share, bad_rows=datasets.bad_rows.count
        ),
    )

"""``erase-rec train`` and ``train.py``: the main job."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # these load torch, which the command line does only after it was checked
    import pandas as pd

    from data.dataset import Datasets
    from erase_rec.api.assembly import Machine
    from erase_rec.config.load import LoadedConfig
    from erase_rec.config.schema import Config
    from erase_rec.distributed.world import World
    from erase_rec.position import Position
    from erase_rec.run_folder import RunFolder
    from erase_rec.run_log import RunLog
    from erase_rec.schedule.overlap import OverlapReport
    from erase_rec.summary import Status, Summary
    from erase_rec.training_loop import Parts, TrainingLoop

RESUMABLE = ("train.", "eval.", "data.workers", "data.reading", "data.prepared")
"""Sections and keys that may change when a run is resumed: no batch depends on them ..."""
FIXED = ("train.local_batch_size", "train.precision", "train.device")
"""... without these: the data position or the numbers depend on them."""


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as train.steps=200 towers.cross.loss.weight=0.5.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="A YAML file, looked up here and in the checkout's configs/.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue the run of this folder from its last checkpoint.")
    ] = None,
) -> None:
    """Train, evaluate, and write runs/ID/{config.yaml, metrics.jsonl, summary.json, events.*, checkpoints/}."""
    if (config is None) == (resume is None):
        raise UserError("give --config FILE to start a run, or --resume RUN_FOLDER to continue one")
    from erase_rec.distributed.failure import INTERRUPTED

    try:
        if resume is not None:
            _resume(resume, overrides or [])
        else:
            assert config is not None
            from data.dataset import build_datasets

            _start(config, overrides or [], build_datasets)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def train_frames(
    name: str, train: pd.DataFrame, eval: pd.DataFrame | None = None, overrides: Sequence[str] = ()
) -> Path:
    """Trains on DataFrames as ``erase-rec train`` does on files, with the same run folder.

    Args:
        name: a configuration file whose ``data.kind`` is ``pandas``, or becomes it by an override.
        train: training rows; those that ``data.split`` and ``data.eval_fraction`` name are held out.
        eval: rows to evaluate; None: those held out of ``train``, if any.
        overrides: ``key=value`` texts.

    Returns:
        The run folder; its ``summary.json`` is what the run came to. It cannot be resumed, since it holds no rows.

    Raises:
        UserError: the configuration or the frames are not as they must be.
    """
    from data.frames import from_pandas

    def build(config: Config, **options: Any) -> Datasets:
        return from_pandas(config, train, eval, **options)

    return _start(name, overrides, build).path


def _start(name: str, overrides: Sequence[str], build: Callable[..., Datasets]) -> RunFolder:
    """A new run. Its folder is made once the data have been read, so that a mistake leaves none behind."""
    from erase_rec import environment
    from erase_rec.api.assembly import ContentCatalog, join_ranks
    from erase_rec.config.load import dump_config, load_config

    loaded = _with_absolute_paths(load_config(name, overrides, catalog=ContentCatalog()))
    config = loaded.config
    with join_ranks(config) as (world, machine):
        folder = _choose_folder(loaded, world)
        datasets = build(config, rank=world.rank, world_size=world.size, pin=machine.pins)
        if world.is_first:
            record = {"command": shlex.join(sys.argv), "data_fingerprint": datasets.fingerprint}
            with folder.made() as beginning:
                datasets.features.save(beginning.features)
                datasets.write_quarantine(beginning.path)
                beginning.write_environment(environment.describe() | record | {"seed": str(config.seed)})
                beginning.write_config(dump_config(config))
        _run(config, folder, datasets, machine, world, start=None, notes=[])
    return folder


def _choose_folder(loaded: LoadedConfig, world: World) -> RunFolder:
    """The folder that the first rank chooses."""
    from erase_rec.run_folder import RunFolder

    run = loaded.config.run
    folder = RunFolder(Path())
    if world.is_first:
        folder = RunFolder.choose(Path(run.dir), run.name, config_name=loaded.name, config_hash=loaded.hash)
    return RunFolder(world.broadcast_object("run_folder", folder.path))


def _resume(path: Path, overrides: list[str]) -> None:
    """Continues a run from its newest whole checkpoint; without one it starts from the first step."""
    from data.dataset import build_datasets, load_features
    from erase_rec.api.assembly import ContentCatalog, join_ranks
    from erase_rec.config.load import dump_config, load_config
    from erase_rec.run_folder import RunFolder

    for override in overrides:
        key = override.partition("=")[0]
        if key in FIXED or not key.startswith(RESUMABLE):
            raise UserError(f"--resume: {key} cannot change in a resumed run; start a new run with --config")
    folder = RunFolder.open(path)
    config = _with_absolute_paths(load_config(str(folder.config), overrides, catalog=ContentCatalog())).config
    with join_ranks(config) as (world, machine):
        features = load_features(folder.features)
        datasets = build_datasets(config, features=features, rank=world.rank, world_size=world.size, pin=machine.pins)
        recorded = folder.read_environment()["data_fingerprint"]
        if recorded != datasets.fingerprint:
            raise UserError(
                f"--resume: the data are not those of the run: their fingerprint is {datasets.fingerprint[:12]}, the "
                f"run read {recorded[:12]}; restore the files, or start a new run with --config {folder.config}"
            )
        start, notes = _newest_checkpoint(folder, config, world)
        if world.is_first:
            folder.write_config(dump_config(config))
        _run(config, folder, datasets, machine, world, start=start, notes=notes)


def _newest_checkpoint(folder: RunFolder, config: Config, world: World) -> tuple[Path | None, list[str]]:
    """The checkpoint that the first rank finds, and what is to be said of it."""
    from erase_rec.checkpoint import CheckpointManager

    found: tuple[Path | None, list[str]] = (None, [])
    if world.is_first:
        checkpoints = CheckpointManager(folder.checkpoints, config.train.keep_checkpoints)
        checkpoints.recover()
        found = checkpoints.latest()
    start, notes = world.broadcast_object("checkpoint", found)
    return start, [*notes, f"resuming from {start or 'the first step'}"]


def _with_absolute_paths(loaded: LoadedConfig) -> LoadedConfig:
    """Data paths that a resumed run finds from any folder."""
    from data.sources.paths import absolute

    data = loaded.config.data
    paths = {split: tuple(absolute(path) for path in getattr(data, split)) for split in ("train", "eval")}
    prepared = None if data.prepared is None else absolute(data.prepared)
    config = loaded.config.model_copy(update={"data": data.model_copy(update={**paths, "prepared": prepared})})
    return replace(loaded, config=config)


def _run(
    config: Config,
    folder: RunFolder,
    datasets: Datasets,
    machine: Machine,
    world: World,
    *,
    start: Path | None,
    notes: list[str],
) -> None:
    """Trains, and leaves logs and a summary whatever happens; the first rank alone writes and speaks."""
    from erase_rec.api.assembly import build_parts
    from erase_rec.checkpoint import read_state
    from erase_rec.config.load import dump_config
    from erase_rec.position import Position, planned_steps
    from erase_rec.progress import Progress, show_progress
    from erase_rec.run_log import FileRunLog, RunLog, final_scalars
    from erase_rec.schedule.autotune import Tuning
    from erase_rec.training_loop import TrainingLoop

    tuned = Tuning.model_validate_json(folder.autotune.read_bytes()) if folder.autotune.exists() else None
    parts = build_parts(config, datasets, folder, machine, world, tuning=tuned)
    if parts.tuning is not None and tuned is None and world.is_first:
        folder.autotune.write_text(parts.tuning.model_dump_json(indent=2) + "\n", encoding="utf-8")
    position = Position() if start is None else Position(**read_state(start)["position"])
    total = planned_steps(config.train, datasets.train, position)
    if position.epoch_rows and (dropped := datasets.train.dropped_rows(position.epoch_rows)):
        notes = [*notes, f"{dropped} of the rows that are left of epoch {position.epoch + 1} are left out of it"]
    with (
        FileRunLog(folder.path, purge_step=position.step + 1) if world.is_first else RunLog() as log,
        show_progress(total, position.step) if world.is_first else Progress() as progress,
    ):
        placement = [] if parts.tuning is None else [parts.tuning.sentence()]
        for message in (*_introduction(config, datasets, folder, machine, world), *placement, *notes):
            progress.message(message)
        log.text("config", f"```yaml\n{dump_config(config)}```")
        log.hparams(config)
        if position.step < total:
            progress.message(_audit(parts, machine, log, position))
        trainer = TrainingLoop(parts, log, progress, position)
        summary = _fit(trainer, datasets, folder, start)
        log.final(trainer.position.step, final_scalars(summary, machine.peak_memory_gib()))
        if trainer.overlap is not None:
            log.text("overlap", trainer.overlap.as_markdown())
    if config.eval.scores and parts.eval_loader is not None:
        _write_scores(trainer, folder)
    if world.is_first:
        _conclude(summary, trainer.overlap, datasets, folder)


def _audit(parts: Parts, machine: Machine, log: RunLog, position: Position) -> str:
    """Finds which loss trains what on the batch that comes first, logs it, and says the verdict.

    Raises:
        UserError: a detached tower would never be trained.
    """
    from erase_rec.schedule.audit import startup_audit
    from models.ctr_model import build_local_losses

    batches = parts.train_loader.batches(position.epoch, position.epoch_rows, endless=True)
    batch = next(batches).to(machine.device)
    batches.close()  # type: ignore[attr-defined]  # stops the loader's threads
    report = startup_audit(parts.model, parts.plan, build_local_losses(parts.config), batch, log)
    return "\n".join(report.verdict())


def _fit(trainer: TrainingLoop, datasets: Datasets, folder: RunFolder, start: Path | None) -> Summary:
    """Trains to the end; the first rank leaves a summary whatever happens to whichever rank."""
    from erase_rec.interrupt import noted_interrupts

    world, progress = trainer.parts.world, trainer.progress

    def last_words() -> None:
        progress.close()
        _summarize(trainer, datasets, "failed").write(folder.path)

    world.last_words = last_words
    status: Status = "failed"
    try:
        if start is not None:
            trainer.resume(start)
        with noted_interrupts() as trainer.check_interrupt:
            status = trainer.fit()
    except KeyboardInterrupt:
        status = "interrupted"
        progress.message(f"interrupted; continue with: python train.py --resume {folder.path}")
        raise
    finally:
        world.last_words = progress.close
        summary = _summarize(trainer, datasets, status)
        if world.is_first:
            summary.write(folder.path)
    return summary


def _write_scores(trainer: TrainingLoop, folder: RunFolder) -> None:
    import pyarrow.parquet as pq

    scores = trainer.evaluate(keep_scores=True).scores
    if trainer.parts.world.is_first:
        pq.write_table(scores, folder.scores)


def _introduction(config: Config, datasets: Datasets, folder: RunFolder, machine: Machine, world: World) -> list[str]:
    """What is about to run, a line each."""
    from models.embeddings.build import choose_backend

    backend, reason = choose_backend(config, machine.device)
    held_out = 0 if datasets.eval is None else datasets.eval.num_rows
    detached = [tower.name for tower in config.towers if tower.detach]
    auxiliary = [tower.name for tower in config.towers if tower.loss and tower.loss.weight > 0 and not tower.detach]
    lines = [
        f"run folder {folder.path}",
        f"{datasets.train.num_rows:,} training rows (base rate {datasets.train.base_rate:.4f}), {held_out:,} held out; "
        f"data fingerprint {datasets.fingerprint[:12]}",
        f"rows are {datasets.origin}",
        f"{len(config.towers)} towers, {len(detached)} detached; preset {config.schedule.preset}; {machine.name()}; "
        f"embeddings by {backend} ({reason})",
    ]
    if world.size > 1:
        lines.append(
            f"{world.size} ranks; a step is {datasets.train.global_batch_size:,} rows, "
            f"{config.train.local_batch_size:,} a rank"
        )
    if config.schedule.cuda_graph != "none" and machine.device.type != "cuda":
        lines.append("schedule.cuda_graph: the CPU has no CUDA graphs; every operation is launched by itself")
    if auxiliary:
        lines.append(f"local losses of towers that are not detached act as auxiliary losses: {', '.join(auxiliary)}")
    lines += datasets.remarks()
    return lines


def _summarize(trainer: TrainingLoop, datasets: Datasets, status: Status) -> Summary:
    """Collective where training came to its end; else, with several ranks, without what needs the others."""
    from erase_rec.summary import (
        DataSummary,
        EvalSummary,
        Summary,
        ThroughputSummary,
        TowerSummary,
        TrainSummary,
        summarize_eval,
    )

    ranks, global_batch_size = trainer.parts.world.size, datasets.train.global_batch_size
    throughput, ne = ThroughputSummary(global_batch_size=global_batch_size, ranks=ranks), math.nan
    if ranks == 1 or status in {"completed", "stopped_early"}:
        throughput = ThroughputSummary.of(trainer.timer.total(), global_batch_size, ranks)
        ne = trainer.parts.metrics.lifetime()["train/ne"]
    evaluation: EvalSummary = EvalSummary()
    towers: dict[str, TowerSummary] = {}
    if trainer.last_eval is not None:
        evaluation, towers = summarize_eval(trainer.last_eval)
    position = trainer.position
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


def _conclude(summary: Summary, overlap: OverlapReport | None, datasets: Datasets, folder: RunFolder) -> None:
    """The result, for people."""
    from rich.console import Console

    from erase_rec.text_table import table_console

    for table in overlap.tables() if overlap is not None else ():
        table_console().print(table.rich())
    console = Console()
    console.print(summary.table())
    if datasets.bayes_ne is not None and not math.isnan(summary.eval.ne):
        console.print(
            f"irreducible NE of these held-out rows {datasets.bayes_ne:.4f}; the model is at {summary.eval.ne:.4f}, "
            f"{100 * (summary.eval.ne / datasets.bayes_ne - 1):.2f} % above it"
        )
    console.print(f"summary: {folder.path / 'summary.json'}", soft_wrap=True)

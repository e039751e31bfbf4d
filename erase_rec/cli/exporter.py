"""From a checkpoint to a folder that other programs serve: traced, checked against the trainer's model, published."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch

from data.block import EncodedBlock
from data.dataset import load_features
from data.features.fitted import Features
from data.gather import Picked, gather
from erase_rec import __version__
from erase_rec.api.assembly import ContentCatalog, Machine, restored_settings, trained_model
from erase_rec.cli.export_folder import (
    AOT,
    MANIFEST,
    ONNX,
    PROGRAM,
    Check,
    Manifest,
    Origin,
    hashes_of_texts,
    record,
    special_rows,
    tensors_of,
    write_features,
)
from erase_rec.cli.export_inputs import ModelInputs
from erase_rec.cli.export_programs import (
    Score,
    load_aot,
    load_onnx,
    load_program,
    refuse_without_compiler,
    refuse_without_onnx,
    save_aot,
    save_onnx,
    save_program,
    trace,
)
from erase_rec.cli.export_rows import generated, rows_to_check
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.errors import UserError
from erase_rec.run_folder import RunFolder
from models.ctr_model import CTRModel

CHECKED_ROWS = 1000
TOLERANCE = 1e-6
"""Largest difference of a probability to the trainer's: float32 sums in another order."""
_EXAMPLE_ROWS = 64
"""Rows of the example that is traced; its bags together hold far more than the 2 values that tracing needs."""
_FIRST_BATCHES = (1, 2, 3, 61)
"""Sizes of the first batches that are checked; what is left of each block is one more."""


@dataclass(frozen=True)
class Trained:
    """What is exported.

    Attributes:
        config: the run's, on the CPU in float32.
        trained_in: ``train.precision`` of the run.
        features: fitted.
        model: in evaluation mode.
        checkpoint: where its weights are from.
        folder: the run's.
    """

    config: Config
    trained_in: str
    features: Features
    model: CTRModel
    checkpoint: Path
    folder: RunFolder

    @classmethod
    def load(cls, wanted: Path) -> Trained:
        """A checkpoint, or of a run folder the best one.

        Raises:
            UserError: there is no whole checkpoint, or it does not fit its run.
        """
        folder = RunFolder.of_checkpoint(wanted)
        as_trained = load_config(str(folder.config), [], catalog=ContentCatalog())
        overrides = ["train.device=cpu", "train.precision=fp32"]
        config = load_config(str(folder.config), overrides, catalog=ContentCatalog()).config
        features, checkpoint = load_features(folder.features), folder.checkpoint(wanted)
        model = trained_model(config, features.table_rows, checkpoint, Machine.prepare(config))
        return cls(config, as_trained.config.train.precision, features, model, checkpoint, folder)


def export(wanted: Path, out: Path, *, onnx: bool, aot: bool, force: bool, say: Callable[[str], None]) -> None:
    """Writes the folder ``out``, which appears as a whole or not at all.

    Args:
        wanted: a checkpoint, or a run folder.
        out: the folder.
        onnx: also write an ONNX file.
        aot: also compile the program.
        force: replace an older export.
        say: takes a line of what happened.

    Raises:
        UserError: it cannot be exported, or an exported program does not give the trainer's probabilities.
    """
    _refuse_occupied(out, force)
    if aot:
        refuse_without_compiler()
    if onnx:
        refuse_without_onnx()
    with restored_settings(on_cuda=False), _published(out) as folder:
        trained = Trained.load(wanted)
        blocks, of = rows_to_check(trained.config, trained.features, CHECKED_ROWS)
        programs = _write_programs(trained, folder, onnx=onnx, aot=aot)
        checks = [_check(name, score, trained.model, blocks, of) for name, score in programs.items()]
        _write_manifest(folder, trained, checks)
        for check in checks:
            say(f"{check.program}: {of}, largest difference of probabilities {check.max_abs_difference:.1e}")
    if trained.trained_in != "fp32":
        say(f"trained in {trained.trained_in}; the export computes in float32, and was compared with float32")


def _write_programs(trained: Trained, folder: Path, *, onnx: bool, aot: bool) -> Mapping[str, Score]:
    """Writes the programs and loads them again, by file name."""
    features = trained.config.features
    example = ModelInputs.of(generated(trained.features, _EXAMPLE_ROWS, seed=1))
    program = trace(trained.model, features, example)
    save_program(program, folder / PROGRAM)
    programs = {PROGRAM: load_program(folder / PROGRAM)}
    if aot:
        save_aot(program, folder / AOT)
        programs[AOT] = load_aot(folder / AOT)
    if onnx:
        inputs, outputs = ([tensor.name for tensor in tensors] for tensors in tensors_of(features))
        save_onnx(program, folder / ONNX, list(trained.model.tower_names()), inputs, outputs)
        programs[ONNX] = load_onnx(folder / ONNX)
    return programs


def _check(name: str, score: Score, model: CTRModel, blocks: Sequence[EncodedBlock], of: str) -> Check:
    """Compares a program with the trainer's model in batches of several sizes.

    Raises:
        UserError: a probability differs by more than the tolerance.
    """
    largest = 0.0
    for block in blocks:
        ends = [0, *(end for end in accumulate(_FIRST_BATCHES) if end < block.num_rows), block.num_rows]
        bounds = list(pairwise(ends))
        rows = np.arange(block.num_rows)
        batches = gather(Picked([block], rows, [stop - start for start, stop in bounds]), rows)
        for (start, stop), batch in zip(bounds, batches, strict=True):
            with torch.no_grad():
                expected = model.score(batch).logit.double().sigmoid()
            found = score(ModelInputs.of(block, start, stop))[0].double()
            difference = float((found - expected).abs().max())
            largest = max(largest, difference if difference == difference else float("inf"))
    if largest > TOLERANCE:
        raise UserError(
            f"export: the probabilities of {name} differ from the trainer's by up to {largest:.1e} over {of}, more "
            f"than {TOLERANCE:.0e}; nothing was exported"
        )
    rows_checked = sum(block.num_rows for block in blocks)
    return Check(program=name, rows=rows_checked, of=of, max_abs_difference=largest, tolerance=TOLERANCE)


def _write_manifest(folder: Path, trained: Trained, checks: Sequence[Check]) -> None:
    dense, sparse = write_features(folder, trained.features, trained.model.embeddings.feature_dims)
    inputs, outputs = tensors_of(trained.config.features)
    environment = trained.folder.read_environment()
    manifest = Manifest(
        origin=Origin(
            checkpoint=f"{trained.folder.path.resolve().name}/{trained.checkpoint.name}",
            config_hash=load_config(str(trained.folder.config), [], catalog=ContentCatalog()).hash,
            data_fingerprint=environment.get("data_fingerprint", "none"),
            trained_in=trained.trained_in,
            erase_rec=__version__,
            torch=version("torch"),
            made=datetime.now(UTC).isoformat(timespec="seconds"),
        ),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        dense=tuple(dense),
        sparse=tuple(sparse),
        special_rows=special_rows(),
        hashes=hashes_of_texts(),
        checks=tuple(checks),
        files=tuple(record(folder, file.name) for file in sorted(folder.iterdir())),
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _refuse_occupied(out: Path, force: bool) -> None:
    """Ends the command where it would have to throw something away that is no older export, or may not.

    Raises:
        UserError: something is at ``out``, or the path names no folder.
    """
    if not out.name or out.name == "..":
        raise UserError(f"--out: found {str(out)!r}, expected the name of a new folder")
    if "\0" in str(out):
        raise UserError(f"--out: found {str(out)!r}, which no file system can name")
    try:
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
    except OSError as error:
        raise UserError(f"--out: {out} cannot be looked at: {error.strerror or error}") from error
    # Other folders of this program, and other programs, have a manifest.json, too.
    if not ((out / MANIFEST).is_file() and (out / PROGRAM).is_file()):
        raise UserError(f"--out: {out} is there and is no export; name another folder")
    if not force:
        raise UserError(f"--out: {out} holds an export; name another folder, or replace it with --force")


@contextmanager
def _published(out: Path) -> Iterator[Path]:
    """A folder that becomes ``out`` at the end of the block; an older export is there until then.

    Where ``out`` is a link, what it points to is replaced.

    Raises:
        UserError: it cannot be written.
    """
    place = Path(os.path.realpath(out))
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    replaced = partial.with_suffix(".replaced")
    try:
        partial.mkdir(parents=True)
        yield partial
        if place.exists():
            place.rename(replaced)
        partial.rename(place)
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not place.exists():
            replaced.rename(place)
        shutil.rmtree(replaced, ignore_errors=True)

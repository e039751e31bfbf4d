"""``erase-rec predict``: click probabilities of a trained run for the rows of other files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # these load torch, which the command line does only after it was checked
    import pyarrow as pa

    from data.sources.source import Source
    from erase_rec.api.predictor import Predictor


class BadRowPolicy(StrEnum):
    """What becomes of rows that cannot be read."""

    error = "error"
    skip = "skip"
    quarantine = "quarantine"


class Device(StrEnum):
    """Where the model computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def command(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a run folder (then its best checkpoint).")],
    input: Annotated[list[str], typer.Option("--input", help="A file, glob or URL; more of them may follow.")],
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")],
    more: Annotated[list[str] | None, typer.Argument(metavar="FILES", help="More input files.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="A column to carry through, such as an id; repeatable.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows a forward pass.  [default: the run's]")] = None,
    device: Annotated[Device, typer.Option(help="Where the model computes.")] = Device.auto,
    bad_rows: Annotated[
        BadRowPolicy | None, typer.Option(help="Rows that cannot be read.  [default: as in the run]")
    ] = None,
    max_bad_share: Annotated[
        float | None, typer.Option(min=0, max=1, help="More bad rows than this share end it.  [default: as in the run]")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="How the files are written: csv, parquet ...  [default: as in the run]")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(help="key=value of data.params, such as delimiter=tab; repeatable.")
    ] = None,
) -> None:
    """Score rows, labelled or not, with a run's transforms and vocabularies; their order is kept."""
    _refuse(out)
    from data.quarantine import write_quarantine
    from erase_rec.api.predictor import Predictor, Scoring
    from erase_rec.distributed.failure import INTERRUPTED

    predictor = Predictor.load(checkpoint, device=device.value)
    source = _open(predictor, [*input, *(more or [])], kind, param or [])
    if any(Path(file.name).resolve() == out.resolve() for file in source.inputs()):
        raise UserError(f"--out: {out} is one of the input files; write somewhere else")
    policy = predictor.config.data.bad_rows if bad_rows is None else bad_rows.value
    scoring = Scoring(
        predictor, source, keep=keep or [], batch_size=batch, bad_rows=policy, max_bad_share=max_bad_share
    )
    try:
        _write(out, scoring.empty(), scoring.tables())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    for line in scoring.remarks():
        typer.echo(line, err=True)
    if policy == "quarantine" and scoring.bad:
        aside = out.with_name(f"{out.name}.quarantine.jsonl")
        write_quarantine(aside, scoring.bad)
        typer.echo(f"rows that could not be read: {aside}", err=True)
    typer.echo(f"{scoring.num_rows:,} predictions: {out}")


def _refuse(out: Path) -> None:
    """Ends the command where predictions cannot be written to ``out``, or would replace what is no file.

    Raises:
        UserError: what is wrong with it.
    """
    if out.suffix.lower() in {".csv", ".tsv", ".txt", ".json", ".jsonl"}:
        raise UserError(
            f"--out: predictions are written as Parquet, found {out}; name it {out.with_suffix('.parquet')}"
        )
    if os.path.exists(out) and not os.path.isfile(out):  # a folder; a device, which a new file would take the place of
        raise UserError(f"--out: {out} is there and is no file; name another")
    if not os.path.isdir(out.parent):
        raise UserError(f"--out: there is no folder {out.parent}; make it, or write somewhere else")


def _open(predictor: Predictor, paths: list[str], kind: str | None, param: list[str]) -> Source:
    """The source of the input: written as the run's files, unless ``--kind`` and ``--param`` say otherwise.

    Raises:
        UserError: the files cannot be found, or the kind or its parameters are wrong.
    """
    from pydantic import ValidationError

    from data.registry import WITHOUT_FILES, open_source
    from erase_rec.config.document import Node
    from erase_rec.config.overrides import parse_overrides
    from erase_rec.errors import ConfigError

    data = predictor.config.data
    wanted = data.kind if kind is None else kind
    if wanted == "pandas" or wanted in WITHOUT_FILES:
        raise UserError(
            f"--kind: {'the run trained on' if kind is None else 'found'} kind {wanted}, which reads no files; say how "
            "these are written: --kind csv, or --kind parquet"
        )
    changes, problems = parse_overrides(param, Node({}, "--param"))
    if problems:
        raise ConfigError([problem.replace("override", "--param", 1) for problem in problems])
    params: dict[str, Any] = (dict(data.params) if wanted == data.kind else {}) | changes.plain()
    try:
        return open_source(wanted, paths, params, seed=predictor.config.seed, split="eval")
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UserError(f"--param: data.params of kind {wanted}: {found}") from error


def _write(path: Path, first: pa.Table, tables: Iterable[pa.Table]) -> None:
    """Writes tables as they come, each a row group; the file appears whole, at the end.

    Args:
        path: the file, which is replaced.
        first: without rows: what the file holds where there are no tables.
        tables: of one schema.

    Raises:
        UserError: the file cannot be written, or a kept column changes its type.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = Path(os.path.realpath(path))  # what a link points to is replaced, not the link
    partial = place.with_name(f".{place.name}.partial")
    writer: pq.ParquetWriter | None = None
    try:
        for table in tables:
            with _writing(path):
                writer = writer or pq.ParquetWriter(partial, table.schema, compression="zstd")
                try:
                    writer.write_table(table.cast(writer.schema))
                except (pa.ArrowException, ValueError) as error:
                    raise UserError(f"--keep: a column is of another type in a later file: {error}") from error
        with _writing(path):
            if writer is None:
                pq.write_table(first, partial)
            else:
                writer.close()
            partial.replace(place)
    except BaseException:
        if writer is not None:
            with suppress(OSError):  # of a full disk, which was the error already
                writer.close()
        with suppress(OSError):  # of a name too long, which was the error already
            partial.unlink()
        raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--out: cannot write {path}: {error.strerror or error}") from error

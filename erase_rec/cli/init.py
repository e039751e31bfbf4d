"""``erase-rec init``: a configuration that trains, from a look at a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # loads pandas and pyarrow, which the command line does only after it was checked
    from erase_rec.api.init_page import Input

_LABEL_HINT = "Is --label right? For a file without a header line give the names with --columns NAME,NAME,..."
_DELIMITERS = {"\t": "tab", ",": ",", ";": ";", "|": "|"}
_HEAD_LINES = 20


def command(
    file: Annotated[str, typer.Argument(help="A CSV, TSV or Parquet file (or a glob of such files).")],
    label: Annotated[str, typer.Option(help="The column that says whether there was a click.")],
    out: Annotated[Path, typer.Option(help="The configuration to write.")] = Path("config.yaml"),
    positive: Annotated[list[str] | None, typer.Option(help="A label that means a click; repeatable.")] = None,
    at_least: Annotated[float | None, typer.Option(help="A click is a label of at least this: ratings.")] = None,
    columns: Annotated[
        str | None, typer.Option(help="Column names, comma separated, of a file without a header.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the configuration that is there.")] = False,
) -> None:
    """Write a configuration for a click log by looking at it; every choice is explained in a comment."""
    if os.path.isdir(out):  # Path's own raises where a name is too long
        raise UserError(f"--out: {out} is a folder; name a file in it")
    if os.path.exists(out) and not force:
        raise UserError(f"--out: {out} exists; name another file, or replace it with --force")
    from erase_rec.api.init_page import configuration

    found = _look_at(file, columns)
    text, summary = configuration(found, label, positive or [], at_least)
    _check(text, out)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror or error}") from error
    for line in summary:
        typer.echo(line)
    typer.echo(f"{out}: read its comments, then train with: erase-rec train --config {out}")


def _look_at(path: str, columns: str | None) -> Input:
    """Kind and delimiter, from the first bytes of the first file.

    Raises:
        UserError: there is no such file, or it is no text.
    """
    from data.sources.paths import resolve
    from data.sources.text_file import first_lines

    first = resolve([path])[0]
    with first.open() as stream:
        if stream.read(4) == b"PAR1":
            if columns is not None:
                raise UserError("--columns: a Parquet file names its columns itself; leave it out")
            return _input(path, "parquet", {})
    lines = [line.decode(errors="replace") for line in first_lines(first, _HEAD_LINES)]
    if not any(lines):
        raise UserError(f"{path}: the file is empty; expected a click log")
    head = lines[0]
    delimiter = max(_DELIMITERS, key=head.count)
    if not head.count(delimiter):
        raise UserError(
            f"{path}: its first line has no TAB, comma, semicolon or bar: {head[:80]!r}; expected delimited text with "
            "a header, or Parquet"
        )
    params: dict[str, Any] = {} if delimiter == "," else {"delimiter": _DELIMITERS[delimiter]}
    if columns is not None:
        params["columns"] = [name.strip() for name in columns.split(",")]
    return _input(path, "csv", params)


def _input(path: str, kind: str, params: dict[str, Any]) -> Input:
    from data.registry import open_source
    from erase_rec.api.init_page import Input

    source = open_source(kind, [path], params, split="train")
    return Input(path, kind, source, [path], params, _LABEL_HINT)


def _check(text: str, out: Path) -> None:
    """The configuration's own loader reads what was written: what it refuses is a fault of this command."""
    from tempfile import TemporaryDirectory

    from erase_rec.cli.data_catalog import DataCatalog
    from erase_rec.config.load import load_config

    with TemporaryDirectory(prefix="erase-rec-") as folder:
        path = Path(folder) / out.name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:  # a name too long
            raise UserError(f"--out: cannot write {out}: {error.strerror or error}") from error
        load_config(path, catalog=DataCatalog())

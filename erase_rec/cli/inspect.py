"""``erase-rec inspect``: what a prepared folder holds, as tables, as JSON and as one HTML page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # loaded after the command line was checked
    from erase_rec.text_table import TextTable


def command(
    folder: Annotated[Path, typer.Argument(help="A folder that erase-rec prepare wrote.")],
    dim: Annotated[int, typer.Option(min=1, help="Dimension of the tables whose feature names none.")] = 16,
    html: Annotated[Path | None, typer.Option(help="Also write a page with plots here.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its checksum first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show schema, missing and unseen shares, cardinalities, label rate over time, bad rows and the tables' memory."""
    from data.inspection import inspect
    from data.inspection_tables import remarks_of, tables_of

    if verify:
        _verify(folder)
    found = inspect(folder, dim)
    if html is not None:
        from data.inspection_page import write_page  # loads matplotlib

        write_page(found, html)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
        return
    for line in remarks_of(found):
        typer.echo(line)
    _show(tables_of(found))
    if verify:
        typer.echo("every file is as it was written")


def _verify(folder: Path) -> None:
    from data.prepared.manifest import Manifest
    from data.prepared.store import damaged

    bad = [file.name for file in damaged(folder, Manifest.read(folder))]
    if bad:
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise UserError(f"{folder}: damaged or missing: {shown}; prepare the data again")


def _show(tables: list[TextTable]) -> None:
    from rich.markup import escape

    from erase_rec.text_table import table_console

    console = table_console()
    for table in tables:
        rows = tuple(tuple(map(escape, row)) for row in table.rows)
        console.print(replace(table, rows=rows).rich())

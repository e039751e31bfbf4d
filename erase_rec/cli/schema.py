"""``erase-rec schema``: the JSON Schema of configuration files, for editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from erase_rec.errors import UserError


def command(
    out: Annotated[Path | None, typer.Option(help="Write it to this file.  [default: standard output]")] = None,
) -> None:
    """Print the JSON Schema of configuration files: completion and checks while typing (docs/python_api.md)."""
    import json

    from erase_rec.api.assembly import ContentCatalog
    from erase_rec.config.json_schema import json_schema

    text = json.dumps(json_schema(ContentCatalog()), indent=2)
    if out is None:
        typer.echo(text)
        return
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror or error}") from error
    typer.echo(f'{out}: name it in the first line of a file: "# yaml-language-server: $schema={out}"')

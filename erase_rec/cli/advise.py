"""``erase-rec advise``: which preset to train a model with on this machine, what it gains, and what it costs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # loaded after the command line was checked
    from erase_rec.advice.report import Advice


def command(
    config: Annotated[str, typer.Option("--config", help="A YAML file: the model and its data.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="About what it may take; a slow model gets the fewest turns that tell.")
    ] = 60.0,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--runs", help="Folder of runs with scores, exact ones and ones with cut towers, that tell NE; repeatable."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write all of it as JSON here.")] = None,
) -> None:
    """Measure your model on this machine and say what limits it, which preset is fastest, and what that costs."""
    started_s = time.monotonic()
    if out is not None and out.suffix != ".json":
        raise UserError(f"--out: expected the name of a JSON file, found {out}; write --out {out.with_suffix('.json')}")
    if out is not None and not out.resolve().parent.is_dir():
        raise UserError(f"--out: there is no folder {out.parent}; make it, or name another file")
    import torch

    from erase_rec.advice.candidates import plan_candidates
    from erase_rec.api.assembly import ContentCatalog
    from erase_rec.config.load import load_config
    from erase_rec.distributed.launch import Place

    if Place.read().size > 1:
        raise UserError("advise: measures one process; start it without torchrun, or use erase-rec bench there")
    catalog, given = ContentCatalog(), overrides or []
    asked = load_config(config, given, catalog=catalog).config
    on_cuda = asked.train.device != "cpu" and torch.cuda.is_available()
    plans = plan_candidates(config, given, on_cuda=on_cuda, catalog=catalog)

    from erase_rec.cli.advise_ne import known_ne
    from erase_rec.cli.advise_workshop import measured_advice

    ne = known_ne(runs, asked) if runs else None
    advice = measured_advice(config, given, plans, ne, started_s=started_s, seconds=seconds)
    _show(advice)
    if out is not None:
        _write(out, advice)


def _show(advice: Advice) -> None:
    from erase_rec.advice.report import sentences, tables
    from erase_rec.text_table import table_console

    console = table_console()
    for table in tables(advice):
        console.print(table.rich())
    for sentence in sentences(advice):
        typer.echo(sentence)
    if advice.ne is None and advice.ne_commands is not None:
        typer.echo(f"\n{advice.ne_commands}")


def _write(out: Path, advice: Advice) -> None:
    try:
        out.write_text(json.dumps(advice.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror or error}") from error
    typer.echo(f"\nwrote {out}")

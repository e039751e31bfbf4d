"""``erase-rec export``: a trained model as a folder that other programs serve."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

_SERVER = Path(__file__).resolve().parents[2] / "examples" / "serve" / "serve.py"


def command(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a run folder (then its best checkpoint).")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write model.onnx.")] = False,
    aot: Annotated[bool, typer.Option("--aot", help="Also compile model.aoti.pt2 for CPUs like this one.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an older export.")] = False,
) -> None:
    """Write a run's model and transforms for serving, checked against the trainer on 1,000 rows."""
    from erase_rec.cli.exporter import export
    from erase_rec.distributed.failure import INTERRUPTED

    typer.echo(f"exporting {checkpoint}: tracing takes up to a minute" + (", compiling some" if aot else ""), err=True)
    try:
        export(checkpoint, out, onnx=onnx, aot=aot, force=force, say=typer.echo)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"export: {out}")
    if _SERVER.is_file():  # not in an installed package
        typer.echo(f"serve it: {shlex.join(['python', os.path.relpath(_SERVER), str(out)])}")

"""The ``erase-rec`` command: joins the subcommands and turns a user's mistake into one message and exit code 2."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Annotated

import typer

from erase_rec import __version__
from erase_rec.cli import (
    advise,
    audit,
    bench,
    compare,
    dashboard,
    doctor,
    evaluate,
    export,
    fetch,
    init,
    inspect,
    plan,
    predict,
    prepare,
    report,
    schema,
    sweep,
    synth,
    timeline,
    train,
)
from erase_rec.errors import UserError
from erase_rec.repeated_warnings import RepeatFilter

DEBUG = "--debug"

app = typer.Typer(
    name="erase-rec",
    help="Train click-through-rate models whose towers run their backward pass early.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("init")(init.command)
app.command("doctor")(doctor.command)
app.command("train")(train.command)
app.command("eval")(evaluate.command)
app.command("predict")(predict.command)
app.command("export")(export.command)
app.command("compare")(compare.command)
app.command("fetch")(fetch.command)
app.command("prepare")(prepare.command)
app.command("inspect")(inspect.command)
app.command("synth")(synth.command)
app.command("schema")(schema.command)
app.command("bench")(bench.command)
app.command("sweep")(sweep.command)
app.command("advise")(advise.command)
app.command("audit")(audit.command)
app.command("timeline")(timeline.command)
app.command("dashboard")(dashboard.command)
app.command("plan")(plan.command)
app.command("report")(report.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"erase-rec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where in the program an error was raised; may stand anywhere.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of ``erase-rec`` and ``python -m erase_rec``."""
    run(app)


def run(command: typer.Typer) -> None:
    """Runs a Typer application; a :class:`UserError` ends it with its message and exit code 2.

    With ``--debug`` anywhere among the arguments the message comes after the traceback. The same warning is shown once;
    how often it came again is said at the end.
    """
    # Threads of libgomp that wait for work spin briefly, then sleep. By default they spin for milliseconds, which on
    # cores shared with other programs costs several times the step. Read when torch is loaded, which comes later.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    logging.basicConfig(format="warning: %(message)s", level=logging.WARNING)
    repeats = RepeatFilter()
    for handler in logging.getLogger().handlers:
        handler.addFilter(repeats)
    debug = DEBUG in sys.argv[1:]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != DEBUG]
    try:
        command()
    except UserError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        for line in repeats.conclusion():
            print(f"warning: {line}", file=sys.stderr)
        for handler in logging.getLogger().handlers:
            handler.removeFilter(repeats)

"""``erase-rec dashboard``: TensorBoard on a folder of runs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Annotated

import typer

from erase_rec.errors import UserError

RUNS = Path("runs")


def command(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, a sweep's folder or one run's folder.")] = RUNS,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Default: 6006 or the next that is free; 0: any that is free."),
    ] = None,
) -> None:
    """Show NE and QPS curves, hyperparameters and final metrics, configurations and audits; Ctrl-C ends it."""
    from erase_rec.run_log import EVENT_PREFIX

    if not os.path.isdir(folder):  # Path's own raises where a name is too long
        raise UserError(f"{folder} is not a folder; train first (make demo), or name the folder of your runs")
    found = {path.parent for path in folder.rglob(f"{EVENT_PREFIX}*")}
    runs = len(found)
    url = _start(folder, port)
    # A second a run: the curves need not wait for it. TensorBoard finds the images as they come.
    threading.Thread(target=_draw_timelines, args=(found,), name="timelines", daemon=True).start()
    shown = f"{runs} {'run' if runs == 1 else 'runs'}" if runs else "no run yet, they appear as they start"
    typer.echo(f"dashboards of {folder} ({shown}): {url} (Ctrl-C ends it)")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        raise typer.Exit from None


def _draw_timelines(folders: set[Path]) -> None:
    from erase_rec.cli.timeline_images import draw_missing

    draw_missing(folders)


def _start(folder: Path, port: int | None) -> str:
    """Serves TensorBoard from threads of this process, to this machine alone; returns its address."""
    from tensorboard import program

    board = program.TensorBoard()
    # Without the loader in a second process: that announces itself as experimental, and outlives a kill of this one.
    arguments = ["tensorboard", "--logdir", str(folder), "--load_fast", "false"]
    if port is not None:
        arguments += ["--port", str(port)]
    try:
        board.configure(argv=arguments)
        return str(board.launch())
    except program.TensorBoardServerException as error:
        raise UserError(
            f"--port: TensorBoard cannot start: {error}; choose another port, or 0 for a free one"
        ) from error

"""``python train.py --config ctr_erase.yaml [key=value ...]``: the same as ``erase-rec train``."""

import typer

from erase_rec.cli import train
from erase_rec.cli.main import run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(train.command)

if __name__ == "__main__":
    run(app)

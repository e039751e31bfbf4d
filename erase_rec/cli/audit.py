"""``erase-rec audit``: which loss trains which parameter, and when each early backward is launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from erase_rec.errors import UserError

FAILED = 1
"""Exit code where the model is not trained as the configuration says."""


def command(
    config: Annotated[str, typer.Option("--config", help="A YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps; each batch is audited before its update.")] = 3,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write the report here.")] = None,
) -> None:
    """Audit real training steps: exit code 0 if every block is trained as declared, 1 if not, 2 if it cannot run."""
    from rich.console import Console

    from erase_rec.cli.short_run import ShortRun
    from erase_rec.schedule.audit import audit
    from erase_rec.schedule.audit_report import merge

    with ShortRun.open(config, overrides or []) as run:
        reports = []
        for step, batch in enumerate(run.batches(steps)):
            reports.append(audit(run.parts.model, run.plan, run.losses, batch, step=step))
            run.parts.step(batch)
        report = merge(reports)
        record = {"config": run.loaded.name, "config_hash": run.loaded.hash, "device": run.machine.name()}
    console = Console(width=None if Console().is_terminal else 160)
    for table in report.tables():
        console.print(table.rich())
    for line in report.verdict():
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if as_json is not None:
        try:
            as_json.write_text(json.dumps(record | report.as_json(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json: cannot write {as_json}: {error.strerror or error}") from error
    if not report.passed:
        raise typer.Exit(FAILED)

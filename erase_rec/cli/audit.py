"""``erase-rec audit``: which loss trains which parameter, and when each early backward is launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # loaded after the command line was checked
    from erase_rec.schedule.audit_report import AuditReport

FAILED = 1
"""Exit code where the model is not trained as the configuration says."""


def command(
    config: Annotated[str, typer.Option("--config", help="A YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Training steps; each batch is audited before its update, up to the first that fails."
        ),
    ] = 3,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write the report here.")] = None,
) -> None:
    """Audit real training steps: exit code 0 if every block is trained as declared, 1 if not, 2 if it cannot run."""
    from erase_rec.cli.short_run import ShortRun
    from erase_rec.schedule.audit import audit
    from erase_rec.schedule.audit_report import merge, of_ranks

    with ShortRun.open(config, overrides or []) as run:
        reports: list[AuditReport] = []
        for step, batch in enumerate(run.batches(steps)):
            reports.append(audit(run.parts.model, run.parts.plan, run.losses, batch, step=step))
            if not reports[-1].passed:
                break  # a model that is not what it is said to be trains no further
            run.parts.step(batch)
        report = of_ranks(run.world.gather_objects("audit", merge(reports)))
        about, is_first = run.about(), run.world.is_first
    if is_first:
        _show(report)
        if as_json is not None:
            _write(as_json, about | report.as_json())
    if not report.passed:
        raise typer.Exit(FAILED)


def _show(report: AuditReport) -> None:
    from erase_rec.text_table import table_console

    console = table_console()
    for table in report.tables():
        console.print(table.rich())
    for line in report.verdict():
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _write(path: Path, record: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json: cannot write {path}: {error.strerror or error}") from error

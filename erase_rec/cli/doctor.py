"""``erase-rec doctor``: whether training can work here, before any time is spent on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # these load torch, which the command line does only after it was checked
    from erase_rec.cli.doctor_machine import Check

FORMAT = 1
"""Of the JSON: raised when a name or a meaning changes; new checks do not."""
FAILED = 1
"""Exit code where there is a problem."""


def command(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, with --config.")] = None,
    config: Annotated[str | None, typer.Option("--config", help="Also check this YAML file and its data.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Check packages, devices, memory and disk, and a configuration: exit code 0, or 1 if there is a problem."""
    if overrides and config is None:
        raise UserError(f"{overrides[0]}: changes a configuration; name it with --config")
    from erase_rec.cli.doctor_config import Diagnosis, config_checks, diagnose_config
    from erase_rec.cli.doctor_machine import look, machine_checks

    diagnosis = Diagnosis([], None) if config is None else diagnose_config(config, overrides or [])
    seen = look(Path("runs" if diagnosis.config is None else diagnosis.config.run.dir))
    checks = [*machine_checks(seen), *diagnosis.checks]
    if diagnosis.config is not None:
        checks += config_checks(diagnosis.config, seen)
    typer.echo(json.dumps(as_record(checks), indent=2) if as_json else "\n".join(map(_line, checks)))
    if any(check.level == "problem" for check in checks):
        raise typer.Exit(FAILED)


def as_record(checks: list[Check]) -> dict[str, Any]:
    """For programs."""
    levels = ("ok", "warning", "problem")
    counts = {level: sum(check.level == level for check in checks) for level in levels}
    return {
        "format": FORMAT,
        "ok": not counts["problem"],
        "counts": counts,
        "checks": [vars(check) for check in checks],
    }


def _line(check: Check) -> str:
    return f"{check.level:<8} {check.name:<12} {check.found}" + (f"  -> {check.way_out}" if check.way_out else "")

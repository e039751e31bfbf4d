"""``erase-rec`` in the test's own process: a subprocess takes seconds to load torch."""

from __future__ import annotations

from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from erase_rec.cli.main import app
from erase_rec.errors import UserError


@dataclass
class Ended:
    """How a command ended."""

    stdout: str
    stderr: str


def call(cwd: Path, *arguments: str, expect: int = 0) -> Ended:
    """Runs a command in ``cwd`` as :func:`erase_rec.cli.main.run` does, and expects this exit code."""
    with chdir(cwd):
        result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, UserError):
        found, stderr = 2, f"error: {result.exception}"
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    else:
        found, stderr = result.exit_code, result.stderr
    assert found == expect, result.output + stderr
    return Ended(result.stdout, stderr)

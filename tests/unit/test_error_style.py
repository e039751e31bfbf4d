"""How commands end where a user made a mistake: one message, exit code 2, a traceback only where it is asked for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from data.errors import DataError
from erase_rec.checkpoint import CheckpointError, CheckpointFormatError
from erase_rec.cli import main as command_line
from erase_rec.cli.main import app, run
from erase_rec.errors import ConfigError, UserError
from erase_rec.finite import NonFiniteLossError
from erase_rec.repeated_warnings import MOST_ALIKE, RepeatFilter

ERRORS = {
    UserError: lambda: UserError("here: found a, expected b; do c"),
    ConfigError: lambda: ConfigError(["a.yaml:1: seed: expected a number, found 'x'"]),
    DataError: lambda: DataError("log.csv, line 3: found 2 fields, expected 3; mend the line"),
    CheckpointError: lambda: CheckpointError("checkpoint x cannot be used: it is cut off"),
    CheckpointFormatError: lambda: CheckpointFormatError("checkpoint x is of format 1; use the version that wrote it"),
}


def ended(call: Callable[[], None], arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs a command of one function; the exit code."""
    single = typer.Typer(pretty_exceptions_enable=False)
    single.command()(call)
    monkeypatch.setattr(sys, "argv", ["erase-rec", *arguments])
    with pytest.raises(SystemExit) as caught:
        run(single)
    return caught.value.code


@pytest.mark.parametrize("kind", ERRORS)
def test_a_users_mistake_is_one_message_and_exit_code_2(
    kind: type[UserError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ERRORS[kind]()

    def fail() -> None:
        raise error

    assert ended(fail, [], monkeypatch) == 2
    assert capsys.readouterr().err == f"error: {error}\n"
    assert ended(fail, ["--debug"], monkeypatch) == 2
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "in fail" in shown
    assert shown.endswith(f"error: {error}\n")


def test_every_error_of_the_program_is_a_users_to_mend() -> None:
    """Kinds of UserError are printed alike, whoever defines them."""
    assert issubclass(NonFiniteLossError, UserError)
    assert all(issubclass(kind, UserError) for kind in ERRORS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--config", "nowhere.yaml"],
        ["eval", "--checkpoint", "nowhere"],
        ["predict", "--checkpoint", "nowhere", "--input", "x", "--out", "y.parquet"],
        ["prepare", "--config", "nowhere.yaml", "--out", "z"],
        ["inspect", "nowhere"],
        ["init", "nowhere.csv", "--label", "click"],
        ["sweep", "--config", "nowhere.yaml"],
        ["report", "nowhere", "--out", "report.html"],
        ["audit", "--config", "nowhere.yaml"],
        ["timeline", "--config", "nowhere.yaml", "--out", "x.png"],
        ["bench", "--config", "nowhere.yaml"],
        ["fetch", "nowhere"],
        ["compare", "nowhere", "--reference", "nowhere"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_debug_works_for_every_command_and_anywhere(
    arguments: list[str],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for debug in ([], ["--debug"]):
        given = [*debug, *arguments] if place == "first" else [*arguments, *debug]
        monkeypatch.setattr(sys, "argv", ["erase-rec", *given])
        with pytest.raises(SystemExit) as caught:
            run(app)
        shown = capsys.readouterr().err
        assert caught.value.code == 2, shown
        assert ("Traceback (most recent call last)" in shown) == bool(debug), shown
        message = shown[shown.rindex("error: ") :]
        assert "nowhere" in message
        if not debug:
            assert shown == message
    assert not list(tmp_path.iterdir()), "a mistake leaves nothing behind"


def test_what_is_no_users_mistake_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    single = typer.Typer(pretty_exceptions_enable=False)
    single.command()(fail)
    monkeypatch.setattr(sys, "argv", ["erase-rec"])
    with pytest.raises(ZeroDivisionError):
        run(single)


def test_the_same_warning_is_shown_once_and_counted_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(logging.Formatter("warning: %(message)s"))
    monkeypatch.setattr(root, "handlers", [stream])

    def warn() -> None:
        for number in range(1000):
            logging.warning("the disk is slow")
            logging.warning("column %s is empty", number)
        logging.error("this is an error")
        logging.error("this is an error")

    assert ended(warn, [], monkeypatch) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("warning: the disk is slow") == 1
    assert sum(line.startswith("warning: column ") for line in lines) == MOST_ALIKE
    assert lines.count("warning: this is an error") == 2
    assert "warning: 999 more like this: the disk is slow" in lines
    assert f"warning: {1000 - MOST_ALIKE} more like this: column 0 is empty" in lines
    assert not any(isinstance(each, RepeatFilter) for each in stream.filters), "nothing stays behind in the process"


def test_debug_is_in_the_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["erase-rec", "--help"])
    with pytest.raises(SystemExit):
        run(app)
    assert command_line.DEBUG in capsys.readouterr().out

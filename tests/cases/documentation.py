"""The fenced blocks of the documentation: what each says, and how it is run or checked."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer._click.exceptions import ClickException

from erase_rec.api.assembly import ContentCatalog
from erase_rec.cli.main import app
from erase_rec.config.load import load_config
from erase_rec.sweep.file import read_sweep
from erase_rec.sweep.points import plan_points

_FENCE = re.compile(r"^( *)```(\w*) *(.*?)\s*$")
_TITLE = re.compile(r'title="([^"]+)"')
_NOT_RUN = re.compile(r"^\s*<!-- not run: (.+) -->\s*$")
_INLINE = re.compile(r"`((?:erase-rec|python train\.py|make) [^`]+)`")
_NO_COMMANDS = {"erase-rec prepared"}
"""Names that look like commands: of a format."""
_SHELL = {"|", ">", ">>", "<", ";", "&", "do", "done", "for"}

_FEW_ROWS = ("data.params={rows: 2000, eval_rows: 500}", "train.local_batch_size=250")
SMALL: dict[str, Sequence[str]] = {
    "ctr_erase.yaml": _FEW_ROWS,
    "ctr_exact.yaml": _FEW_ROWS,
    "table1/row2.yaml": _FEW_ROWS,
    "table1/row0_nonblocking.yaml": _FEW_ROWS,
    "ctr_movielens.yaml": ("train.local_batch_size=128",),
    "ctr_criteo.yaml": ("train.epochs=null", "train.steps=4", "train.local_batch_size=64"),
    "ctr_avazu.yaml": ("train.epochs=null", "train.steps=4", "train.local_batch_size=64"),
}
"""Overrides that make the commands of the pages small enough to be run by a test, by configuration."""

SMALL_PROGRAM = {
    '"train.steps=200", "data.params.rows=20000"': '"train.steps=4", "data.params={rows: 2000, eval_rows: 500}"',
}
"""The same of programs: what is written, and what the test runs instead."""

FAST = ("embedding.backend=torch", "train.threads=1")
"""What makes every run small: FBGEMM takes seconds to load, so it is loaded where tables are spread alone."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        place: ``page:line``.
        language: of the fence; empty where it names none.
        title: file name that the page gives the block; None: it is no file.
        text: without the fence's own indentation.
        reason: why it is not run, from an HTML comment above it.
    """

    place: str
    language: str
    title: str | None
    text: str
    reason: str | None


def blocks(page: Path, root: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found, lines, reason = [], page.read_text(encoding="utf-8").splitlines(), None
    at = 0
    while at < len(lines):
        if fence := _FENCE.match(lines[at]):
            end = next(n for n in range(at + 1, len(lines)) if re.match(rf"^{fence[1]}```\s*$", lines[n]))
            title = _TITLE.search(fence[3])
            text = textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n"
            place = f"{page.relative_to(root)}:{at + 1}"
            found.append(Block(place, fence[2], title[1] if title else None, text, reason))
            at, reason = end, None
        elif lines[at].strip():
            marked = _NOT_RUN.match(lines[at])
            reason = marked[1] if marked else None
        at += 1
    return found


def inline_commands(page: Path) -> list[str]:
    """Commands inside sentences and tables."""
    outside = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [command for found in _INLINE.findall(outside) if (command := " ".join(found.split())) not in _NO_COMMANDS]


def lines_of(text: str) -> Iterator[str]:
    """Command lines, continued ones joined, without comments and empty lines."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def words_of(line: str) -> list[str]:
    """A line as the shell reads it; operators are words of their own."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def commands_of(line: str) -> list[list[str]]:
    """Commands of a line that are joined by ``&&``."""
    commands: list[list[str]] = [[]]
    for word in words_of(line):
        if word == "&&":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def needs_a_shell(words: Sequence[str]) -> bool:
    """Pipes, redirections, loops: what a shell has to run."""
    return any(word in _SHELL for word in words)


def own_arguments(words: Sequence[str]) -> list[str] | None:
    """Arguments of ``erase-rec`` where the words are a command of this project, under torchrun or not."""
    for at, word in enumerate(words):
        if word == "erase-rec":
            return list(words[at + 1 :])
        if Path(word).name == "train.py":
            return ["train", *words[at + 1 :]]
    return None


def made_small(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command that trains, with overrides that make it small; keys that are given stay."""
    if arguments[0] not in {"train", "prepare", "audit", "timeline", "bench"} or "--config" not in arguments:
        return list(arguments)
    config = arguments[list(arguments).index("--config") + 1]
    return [*arguments, *small_overrides(config, arguments)]


def small_overrides(config: str, arguments: Sequence[str]) -> list[str]:
    """What makes the command small, less the keys that its arguments give."""
    given = {argument.partition("=")[0] for argument in arguments}
    if "embedding.sharding" in given:
        given.add("embedding.backend")
    more = (*SMALL.get(config, ()), *FAST)
    return [override for override in more if override.partition("=")[0] not in given]


def small_program(text: str) -> str:
    """A program of a page with fewer steps and rows."""
    for written, small in SMALL_PROGRAM.items():
        text = text.replace(written, small)
    return text


def check_words(words: Sequence[str], place: str) -> None:
    """A command that is not run: its subcommand, options, configuration and overrides are there, its script too."""
    arguments = own_arguments(words)
    if arguments is not None:
        check_arguments([argument for argument in arguments if argument not in _SHELL], place)
    elif words[:1] == ["make"]:
        check_make(words[1:], place)
    elif words[0] == "python" and words[1:] and words[1].endswith(".py"):
        script = _root() / words[1]
        assert script.is_file(), f"{place}: no file {words[1]}"
        source = script.read_text(encoding="utf-8")
        for option in (word.partition("=")[0] for word in words[2:] if word.startswith("--")):
            assert f'"{option}"' in source or option[2:].replace("-", "_") in source, (
                f"{place}: {words[1]} has no {option}"
            )


def check_arguments(arguments: Sequence[str], place: str) -> None:
    """Subcommand and options as the command line reads them; then the configuration with its overrides."""
    group: Any = typer.main.get_command(app)
    if arguments[:1] == ["--version"] or not arguments:
        return
    name, *rest = arguments
    assert name in group.commands, f"{place}: there is no command {name!r}"
    command = group.commands[name]
    try:
        context = command.make_context(name, list(rest))
    except ClickException as error:
        pytest.fail(f"{place}: {' '.join(arguments)}: {error.format_message()}")
    except typer.Exit:  # --help
        return
    overrides = [value for value in context.params.get("overrides") or [] if "=" in value]
    config = context.params.get("config")
    if config is None or any("$" in word for word in arguments):
        return
    assert (_root() / "configs" / config).is_file() or "/" not in config, f"{place}: no configuration {config}"
    if not (_root() / "configs" / config).is_file():
        return  # one that the page made
    if name == "sweep":
        plan_points(read_sweep(config), overrides, catalog=ContentCatalog())
    else:
        load_config(config, overrides, catalog=ContentCatalog())


def check_make(words: Sequence[str], place: str) -> None:
    """The targets are in the Makefile."""
    makefile = (_root() / "Makefile").read_text(encoding="utf-8")
    for word in words:
        assert "=" in word or re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), f"{place}: make {word}"


def check_synopsis(line: str, place: str) -> None:
    """A command that is described rather than given: its subcommand and all options that it names exist."""
    words = re.sub(r"[\[\]|]", " ", line).split()
    if words[0] == "make":
        return check_make([word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)][:1], place)
    group: Any = typer.main.get_command(app)
    name = "train" if words[0] == "python" else words[1]
    if name.startswith("-") or name == "COMMAND":
        return None
    assert name in group.commands, f"{place}: there is no command {name!r} ({line})"
    known = {option for parameter in group.commands[name].params for option in parameter.opts} | {"--help"}
    named = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    assert named <= known, f"{place}: {name} has no {', '.join(sorted(named - known))}"
    return None


def _root() -> Path:
    return Path(__file__).resolve().parents[2]

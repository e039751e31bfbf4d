"""The reference of commands, from what ``--help`` reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer
import typer.main


def commands_as_markdown(app: typer.Typer) -> str:
    """The whole page: usage, description, arguments and options of each command."""
    group: Any = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "Written from the commands themselves; `erase-rec COMMAND --help` says the same. Arguments `key=value`",
        "override keys of the [configuration](configuration.md). A mistake ends with one message and exit code 2.",
        "",
        *_table(group),
    ]
    for name, command in group.commands.items():
        context = command.context_class(command, info_name=f"erase-rec {name}")
        usage = " ".join(command.collect_usage_pieces(context))
        lines += ["", f"## {name}", "", _prose(command.help), "", "```text", f"erase-rec {name} {usage}", "```", ""]
        lines += _table(command)
    return "\n".join([*lines, ""])


def _table(command: Any) -> Iterator[str]:
    yield "| argument or option | default | meaning |"
    yield "|---|---|---|"
    for parameter in command.params:
        if parameter.hidden:
            continue
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        default = "required" if parameter.required else _default(parameter.default)
        cells = (names, default, _prose(parameter.help))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(value: Any) -> str:
    if value is None or value is False or callable(value):
        return ""
    return f"`{value}`"


def _prose(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").replace("<", "&lt;").split())

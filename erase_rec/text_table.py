"""One table for both places that show it: the terminal (rich) and TensorBoard's texts (Markdown)."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 160
"""Columns where the output is no terminal, whose width rich would take to be 80."""


@dataclass(frozen=True)
class TextTable:
    """Cells of a table.

    Attributes:
        title: line above it.
        header: a name a column.
        rows: as many cells as the header.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The title in bold and a Markdown table."""
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"**{self.title}**\n\n{body}\n"

    def rich(self) -> Table:
        """For a rich console."""
        table = Table(*self.header, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        return table


def table_console() -> Console:
    """A console for standard output that is wide enough for tables."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)

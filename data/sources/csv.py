"""Delimited text in general: any one-character delimiter, with or without a header line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from data.errors import DataError
from data.sources import delimited
from data.sources.delimited import Dialect
from data.sources.paths import content_fingerprint, resolve
from data.sources.source import Block, Split
from erase_rec.config.types import Params, Text, Texts


def _delimiter(text: str) -> str:
    character = {"tab": "\t", "\\t": "\t", "comma": ",", "space": " "}.get(text.lower(), text)
    if len(character.encode()) != 1 or character in '\r\n"':
        raise ValueError(f"expected one ASCII character, or tab, found {text!r}")
    return character


def _quote(text: str) -> str:
    if text.lower() != "none" and (len(text.encode()) != 1 or text in "\r\n"):
        raise ValueError(f"expected one ASCII character, or none, found {text!r}")
    return text.lower()


class CSVSource:
    """Rows of CSV files, columns matched by name: files may have theirs in different orders."""

    class Config(Params):
        """How the files are written."""

        delimiter: Annotated[Text, AfterValidator(_delimiter)] = ","
        r"""One character; ``tab`` and ``\t`` are a TAB."""
        quote: Annotated[Text, AfterValidator(_quote)] = '"'
        """Encloses fields that hold the delimiter; ``none``: quotes are ordinary characters."""
        columns: Texts = ()
        """Column names of files without a header line; empty: the first line of each file is its header."""

    label_column: str | None = None

    def __init__(self, config: Config, paths: Sequence[str], *, seed: int, split: Split) -> None:
        """Finds the files; ``seed`` has no meaning here."""
        self._config = config
        self._dialect = Dialect(config.delimiter, None if config.quote == "none" else config.quote)
        self._files = resolve(paths)
        self._split = split

    def columns(self) -> list[str]:
        """Column names of the first file."""
        return self._names(self._files[0])

    def blocks(self, columns: Sequence[str]) -> Iterator[Block]:
        """Rows as ``string`` columns; the empty text means missing."""
        for file in self._files:
            yield from self._file_blocks(file, columns)

    def fingerprint(self) -> str:
        """Identity of the files' content."""
        return content_fingerprint(self._files)

    def _names(self, file: Path) -> list[str]:
        return list(self._config.columns) or delimited.header(file, self._dialect)

    def _file_blocks(self, file: Path, columns: Sequence[str]) -> Iterator[Block]:
        has_header = not self._config.columns
        empty = True
        for block in delimited.blocks(file, self._dialect, self._names(file), columns, has_header=has_header):
            empty = False
            yield block
        if empty and self._split == "train":
            raise DataError(f"{file}: the file {'holds a header and no rows' if has_header else 'is empty'}; remove it")

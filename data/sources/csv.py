"""Delimited text in general: any one-character delimiter, with or without a header line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import AfterValidator

from data.sources.content import InputFiles
from data.sources.delimited import Layout, text_chunks
from data.sources.dialect import Dialect, header
from data.sources.paths import File, resolve
from data.sources.source import Chunk, InputFile, Split
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
        self._files = InputFiles(resolve(paths))
        self._split = split

    def columns(self) -> list[str]:
        """Column names of the first file."""
        return list(self._names(self._files.files[0]))

    def inputs(self) -> list[InputFile]:
        """The files."""
        return self._files.inputs()

    def num_bytes(self) -> int:
        """Size of the files."""
        return self._files.num_bytes()

    def chunks(self) -> Iterator[Chunk]:
        """Chunks of text; all files' headers are read first."""
        has_header = not self._config.columns
        layouts = [Layout(self._dialect, self._names(file), has_header) for file in self._files.files]
        yield from text_chunks(self._files, layouts, self._split)

    def fingerprint(self) -> str:
        """Identity of the files' content."""
        return self._files.fingerprint()

    def _names(self, file: File) -> tuple[str, ...]:
        return tuple(self._config.columns or header(file, self._dialect))

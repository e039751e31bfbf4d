"""Criteo's click logs in the Kaggle and Terabyte layout: TAB separated, no header, label, I1-I13, C1-C26.

Every column is text: hashes such as ``891589e7`` only look like numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from data.errors import DataError
from data.sources import text_file
from data.sources.content import InputFiles
from data.sources.delimited import Layout, text_chunks
from data.sources.dialect import Dialect, count_fields, shorten
from data.sources.paths import File, resolve
from data.sources.source import Chunk, InputFile, Split
from erase_rec.config.types import Boolean, Params

DENSE = tuple(f"I{index}" for index in range(1, 14))
SPARSE = tuple(f"C{index}" for index in range(1, 27))

_DIALECT = Dialect("\t", None)
_SAMPLE_LINES = 10


class CriteoSource:
    """Rows of Criteo TSV files."""

    class Config(Params):
        """What the lines hold."""

        has_label: Boolean = True
        """The first field is the label; false for the contest's test file."""

    def __init__(self, config: Config, paths: Sequence[str], *, seed: int, split: Split) -> None:
        """Finds the files; ``seed`` has no meaning here."""
        self.label_column = "label" if config.has_label else None
        self._names = (*(["label"] if config.has_label else []), *DENSE, *SPARSE)
        self._files = InputFiles(resolve(paths))
        self._split = split

    def columns(self) -> list[str]:
        """``label`` (where there is one), ``I1`` to ``I13``, ``C1`` to ``C26``."""
        return list(self._names)

    def inputs(self) -> list[InputFile]:
        """The files."""
        return self._files.inputs()

    def num_bytes(self) -> int:
        """Size of the files."""
        return self._files.num_bytes()

    def chunks(self) -> Iterator[Chunk]:
        """Chunks of text; the first lines of all files are looked at first."""
        for file in self._files.files:
            self._check_first_lines(file)
        layout = Layout(_DIALECT, self._names, has_header=False)
        yield from text_chunks(self._files, [layout] * len(self._files.files), self._split)

    def fingerprint(self) -> str:
        """Identity of the files' content."""
        return self._files.fingerprint()

    def _check_first_lines(self, file: File) -> None:
        """Finds what the number of fields cannot show: a header. And what it shows best here: another layout.

        A first line that is damaged among others that fit is a bad row, and the business of who reads it.
        """
        lines = [line.decode(errors="replace") for line in text_file.first_lines(file, _SAMPLE_LINES)]
        if not lines and self._split == "train":
            raise DataError(f"{file.name}: the file is empty; expected lines of {self._layout()}")
        if not any(lines):
            return
        fields = _DIALECT.fields(lines[0])
        where = f"{file.name}, line 1"
        if len(fields) != len(self._names):
            if any(len(_DIALECT.fields(line)) == len(self._names) for line in lines[1:]):
                return
            raise DataError(
                f"{where}: found {count_fields(len(fields))}, expected {self._layout()}: "
                f"{shorten(lines[0])!r}. {self._likely_cause(lines[0], len(fields))}"
            )
        found = {name: field for name, field in zip(self._names[: -len(SPARSE)], fields, strict=False) if field}
        if found and not any(re.fullmatch(r"[-+.\deE]+", field) for field in found.values()):
            name, field = next(iter(found.items()))
            raise DataError(
                f"{where}, column {name}: found {shorten(field)!r}, expected a number or nothing; "
                "the line looks like a header: remove it"
            )

    def _layout(self) -> str:
        label = "label, " if self.label_column else ""
        return f"{len(self._names)} TAB separated fields ({label}I1-I13, C1-C26, no header)"

    def _likely_cause(self, line: str, found: int) -> str:
        if suspicion := _DIALECT.suspect(line):
            return f"{suspicion}; use data.kind: csv"
        if found == len(DENSE + SPARSE) and self.label_column:
            return "One field is missing: if these rows have no label, set data.params.has_label: false"
        if found == len(DENSE + SPARSE) + 1 and not self.label_column:
            return "One field is left over: if these rows have a label, set data.params.has_label: true"
        return "The file has another layout; use data.kind: csv with data.params.delimiter: tab"

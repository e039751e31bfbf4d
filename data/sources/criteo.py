"""Criteo's click logs in the Kaggle and Terabyte layout: TAB separated, no header, label, I1-I13, C1-C26.

Every column is text: hashes such as ``891589e7`` only look like numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.errors import DataError
from data.sources import delimited, text_file
from data.sources.delimited import Dialect
from data.sources.paths import content_fingerprint, resolve
from data.sources.source import Block, Split
from erase_rec.config.types import Boolean, Params

DENSE = tuple(f"I{index}" for index in range(1, 14))
SPARSE = tuple(f"C{index}" for index in range(1, 27))

_DIALECT = Dialect("\t", None)


class CriteoSource:
    """Rows of Criteo TSV files."""

    class Config(Params):
        """What the lines hold."""

        has_label: Boolean = True
        """The first field is the label; false for the contest's test file."""

    def __init__(self, config: Config, paths: Sequence[str], *, seed: int, split: Split) -> None:
        """Finds the files; ``seed`` has no meaning here."""
        self.label_column = "label" if config.has_label else None
        self._names = [*(["label"] if config.has_label else []), *DENSE, *SPARSE]
        self._files = resolve(paths)
        self._split = split

    def columns(self) -> list[str]:
        """``label`` (where there is one), ``I1`` to ``I13``, ``C1`` to ``C26``."""
        return list(self._names)

    def blocks(self, columns: Sequence[str]) -> Iterator[Block]:
        """Rows as ``string`` columns; the empty text means missing."""
        for file in self._files:
            self._check_first_line(file)
            yield from delimited.blocks(file, _DIALECT, self._names, columns, has_header=False)

    def fingerprint(self) -> str:
        """Identity of the files' content."""
        return content_fingerprint(self._files)

    def _check_first_line(self, file: Path) -> None:
        """Finds what the number of fields cannot show: a header. And what it shows best here: another layout."""
        line = text_file.first_line(file).decode(errors="replace")
        if not line:
            if self._split == "train":
                raise DataError(f"{file}: the file is empty; expected lines of {self._layout()}")
            return
        fields = _DIALECT.fields(line)
        where = f"{file}, line 1"
        if len(fields) != len(self._names):
            raise DataError(
                f"{where}: found {delimited.count_fields(len(fields))}, expected {self._layout()}: "
                f"{delimited.shorten(line)!r}. {self._likely_cause(line, len(fields))}"
            )
        for name, field in zip(self._names[: -len(SPARSE)], fields, strict=False):
            if not re.fullmatch(r"[-+.\deE]*", field):
                raise DataError(
                    f"{where}, column {name}: found {delimited.shorten(field)!r}, expected a number or nothing; "
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

"""Avazu's click log in the layout of its Kaggle contest: commas, a header line, the label in ``click``.

Every column is text: ``id`` exceeds 64 bits, and hashes such as ``3e814130`` only look like numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data.sources.csv import CSVSource
from data.sources.source import Chunk, InputFile, Split
from erase_rec.config.types import Params


class AvazuSource:
    """Rows of Avazu CSV files."""

    class Config(Params):
        """Nothing to configure: the layout is fixed."""

    label_column: str | None = "click"

    def __init__(self, config: Config, paths: Sequence[str], *, seed: int, split: Split) -> None:
        """Finds the files; ``seed`` has no meaning here."""
        self._csv = CSVSource(CSVSource.Config(), paths, seed=seed, split=split)

    def columns(self) -> list[str]:
        """Column names of the first file."""
        return self._csv.columns()

    def inputs(self) -> list[InputFile]:
        """The files."""
        return self._csv.inputs()

    def num_bytes(self) -> int:
        """Size of the files."""
        return self._csv.num_bytes()

    def chunks(self) -> Iterator[Chunk]:
        """Chunks of text."""
        return self._csv.chunks()

    def fingerprint(self) -> str:
        """Identity of the files' content."""
        return self._csv.fingerprint()

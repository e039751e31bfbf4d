"""From a chunk of input to raw rows and their split: the same steps for rows kept in memory, streamed and prepared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.bad_rows import BadRows
from data.errors import DataError
from data.features.columns import column_of, columns_of, features_of
from data.features.encoding import BoolArray
from data.features.raw import RawRows, concatenate
from data.features.read import read_rows
from data.fingerprint import holds_out
from data.registry import WITHOUT_FILES, open_source
from data.sources.source import Chunk, Source, Split
from data.split import held_out, leave_out_untimed, left_out, split_column
from erase_rec.config.schema import Config, DataConfig, FeaturesConfig


@dataclass(frozen=True)
class ChunkRows:
    """The readable rows of a chunk.

    Attributes:
        rows: at least one.
        held_out: bool [R], which are evaluated.
        trained: bool [R], which are trained on. What is neither is left out by ``data.negative_sampling_rate``.
    """

    rows: RawRows
    held_out: BoolArray
    trained: BoolArray

    @property
    def num_left_out(self) -> int:
        """Rows of neither split."""
        return int(np.count_nonzero(~(self.held_out | self.trained)))

    def part(self, split: Split) -> RawRows | None:
        """The rows of a split; None: there are none."""
        keep = self.held_out if split == "eval" else self.trained
        if keep.all():
            return self.rows
        return self.rows.select(keep) if keep.any() else None


@dataclass(frozen=True)
class Reading:
    """How the rows of a source are read; picklable.

    Attributes:
        features: defaults filled in.
        data: checked.
        seed: of the split.
        label_column: name of the label's column in this source.
        split: what the source is for; rows of ``train`` are split, those of ``eval`` are all held out.
    """

    features: FeaturesConfig
    data: DataConfig
    seed: int
    label_column: str
    split: Split

    @classmethod
    def of(cls, config: Config, source: Source, split: Split) -> Reading:
        """For a source of ``config``.

        Raises:
            DataError: the label's column is not known, or is read by a feature.
        """
        return cls(config.features, config.data, config.seed, label_column_of(config, source), split)

    @property
    def extra(self) -> list[str]:
        """Columns besides label and features: what splits the rows, and what names them."""
        splitting = split_column(self.data) if self.split == "train" else None
        return list(dict.fromkeys(name for name in (splitting, self.data.row_id) if name is not None))

    @property
    def columns(self) -> list[str]:
        """All columns that are read."""
        return list(dict.fromkeys([self.label_column, *columns_of(*features_of(self.features)), *self.extra]))

    def read(self, chunk: Chunk, bad: BadRows) -> ChunkRows | None:
        """The rows of a chunk; None: there is no readable one.

        Raises:
            DataError: the chunk cannot be read, or under the policy ``error`` a row cannot.
        """
        parts = [
            read_rows(self.features, self.label_column, self.data.label, block, bad, self.extra)
            for block in chunk.blocks(self.columns, bad)
        ]
        parts = [part for part in parts if part.num_rows]
        if not parts:
            return None
        rows = concatenate(parts)
        if self.split == "eval":
            all_rows = np.ones(rows.num_rows, dtype=np.bool_)
            return ChunkRows(rows, all_rows, ~all_rows)
        rows = leave_out_untimed(self.data, rows, bad)
        if not rows.num_rows:
            return None
        held, left = held_out(self.data, self.seed, rows), left_out(self.data, self.seed, rows)
        return ChunkRows(rows, held, ~held if left is None else ~(held | left))


def open_train(config: Config) -> Source:
    """The source of ``data.train``.

    Raises:
        DataError: a file is not there.
    """
    return open_source(config.data.kind, config.data.train, config.data.params, seed=config.seed, split="train")


def open_eval(config: Config) -> Source | None:
    """The source of held-out rows that are no part of the training source; None: there is none.

    Raises:
        DataError: a file is not there.
    """
    own = config.data.kind in WITHOUT_FILES and not holds_out(config.data)
    if not config.data.eval and not own:
        return None
    return open_source(config.data.kind, config.data.eval, config.data.params, seed=config.seed, split="eval")


def label_column_of(config: Config, source: Source) -> str:
    """The column that the label is read from.

    Raises:
        DataError: neither the configuration nor the kind of log says, or a feature reads it.
    """
    label = source.label_column if config.data.label.column is None else config.data.label.column
    if label is None:
        raise DataError(
            f"data.label.column: kind {config.data.kind!r} has no label column of its own; name one of "
            f"{', '.join(map(repr, source.columns()))}"
        )
    for feature in features_of(config.features):
        if column_of(feature) == label:
            raise DataError(
                f"features: {feature.name!r} reads {label!r}, which is the label; take it out of the features, "
                "or name another data.label.column"
            )
    for key, column in (("data.split.column", split_column(config.data)), ("data.row_id", config.data.row_id)):
        if column == label:
            raise DataError(f"{key}: {label!r} is the label's column; name another one")
    return label

"""What a preparation found, added up group by group and written down as the manifest."""

from __future__ import annotations

import platform
from collections import Counter
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from data.bad_rows import refuse_too_many
from data.errors import DataError
from data.features.columns import features_of
from data.features.encoding import FIRST_ROW
from data.features.fitted import Encoding, Features
from data.features.hashing import HashBuckets
from data.features.raw import CellCounts
from data.features.vocabulary import Vocabulary
from data.fingerprint import fingerprint, holds_out, settings
from data.leaks import Repeats
from data.prepared.manifest import (
    FORMAT,
    VERSION,
    BadRowsRecord,
    FeatureRecord,
    FileRecord,
    Manifest,
    RowIdsRecord,
    SplitRecord,
)
from data.prepared.plan import Input
from data.prepared.records import BadRowRecord, EncodedRecord, GroupRecord
from data.prepared.work import SPLITS
from data.quarantine import count_reasons, fewer
from data.sources.source import Split, Unit
from erase_rec import __version__
from erase_rec.config.schema import Config, SparseFeatureConfig


class Tally:
    """Grows with each group that is read and each part that is written, in order.

    Attributes:
        groups: of both sources, without their bad rows.
        rows: rows of each split.
        num_bad: rows left out.
    """

    def __init__(self, config: Config) -> None:
        """Of nothing yet."""
        self._config = config
        self._counts = CellCounts.zero(config.features)
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._encoded: dict[Split, list[EncodedRecord]] = {"train": [], "eval": []}
        self._rows_read = 0
        self.groups: list[GroupRecord] = []
        self.num_bad = 0

    def add_group(self, record: GroupRecord) -> None:
        """A group was read.

        Raises:
            DataError: too many rows are bad.
        """
        self._counts += CellCounts(
            *(np.array(each, dtype=np.int64) for each in (record.cells, record.missing, record.clipped))
        )
        self._rows_read += record.rows_read
        self._add_bad(record.bad)
        self.groups.append(record.model_copy(update={"bad": []}))
        if record.encoded is not None:
            self.add_part(record.encoded)

    def add_part(self, record: EncodedRecord) -> None:
        """A part was written."""
        self._encoded[record.split].append(record)

    def rows_of(self, split: Split) -> int:
        """Rows in the parts so far."""
        return sum(record.rows for record in self._encoded[split])

    def manifest(
        self,
        inputs: dict[Split, Input],
        features: Features,
        fitted: list[FileRecord],
        repeats: Repeats | None,
        command: str,
    ) -> Manifest:
        """The whole.

        Args:
            inputs: sources that were read to their end.
            features: fitted.
            fitted: their files.
            repeats: of row ids; None: they were not compared.
            command: how it was called.
        """
        config = self._config
        files, unit = self.places(inputs)
        held_out = inputs.get("eval")
        evaluated: tuple[Split, ...] = SPLITS if held_out is not None or holds_out(config.data) else ("train",)
        return Manifest(
            format=FORMAT,
            version=VERSION,
            fingerprint=fingerprint(
                config,
                inputs["train"].source.fingerprint(),
                None if held_out is None else held_out.source.fingerprint(),
            ),
            settings=settings(config),
            inputs={split: each.files for split, each in inputs.items()},
            files=files,
            unit=unit,
            features=self._features(features),
            fitted=fitted,
            splits={split: self._split(split) for split in evaluated},
            rows_read=self._rows_read,
            bad_rows=BadRowsRecord(policy=config.data.bad_rows, count=self.num_bad, reasons=fewer(self._reasons)),
            row_ids=None if repeats is None else self._row_ids(repeats, files, unit),
            made={
                "command": command,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "erase_rec": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "pyarrow": pa.__version__,
            },
        )

    def places(self, inputs: dict[Split, Input]) -> tuple[list[str], Unit]:
        """Names of the files by position, and what numbers in them count."""
        names = [file.name for each in inputs.values() for file in each.files]
        for group in self.groups:
            for position, name in group.files.items():
                names[position] = name
        return names, next((group.unit for group in self.groups if group.unit is not None), "row")

    def _add_bad(self, bad: list[BadRowRecord]) -> None:
        rows = [record.row() for record in bad]
        self.num_bad += len(rows)
        for row in rows:
            (reason,) = count_reasons([row])
            self._reasons[reason] += 1
            self._examples.setdefault(reason, f"{row.file}, {row.unit} {row.number}")
        try:
            refuse_too_many(self.num_bad, self._rows_read, self._config.data.max_bad_share)
        except DataError as error:
            (reason, count), *_ = self._reasons.most_common(1)
            raise DataError(f"{error}. The most frequent ({count} rows, {self._examples[reason]}): {reason}") from None

    def _split(self, split: Split) -> SplitRecord:
        records = self._encoded[split]
        rows, positives = self.rows_of(split), sum(record.positives for record in records)
        return SplitRecord(
            rows=rows,
            positives=positives,
            label_rate=positives / rows if rows else None,
            unseen=self._by_name([record.unseen for record in records]),
            values=self._by_name([record.values for record in records]),
            parts=[record.part_record() for record in records],
        )

    def _by_name(self, counts: list[list[int]]) -> dict[str, int]:
        """Sums of the parts' counts of each sparse feature."""
        names = [feature.name for feature in self._config.features.sparse]
        return {name: sum(column[position] for column in counts) for position, name in enumerate(names)}

    def _features(self, features: Features) -> list[FeatureRecord]:
        dense, sparse = self._config.features.dense, self._config.features.sparse
        counts = self._counts
        clipped: list[int | None] = [*counts.clipped.tolist(), *(None for _ in sparse)]
        records = []
        for position, feature in enumerate(features_of(self._config.features)):
            encoding = features.encodings[position - len(dense)] if position >= len(dense) else None
            bag = isinstance(feature, SparseFeatureConfig) and feature.multi_valued
            records.append(
                FeatureRecord(
                    name=feature.name,
                    kind="dense" if encoding is None else "bag" if bag else "single",
                    table_rows=None if encoding is None else encoding.table_rows,
                    known=None if encoding is None else _known(encoding),
                    cells=int(counts.cells[position]),
                    missing=int(counts.missing[position]),
                    clipped=clipped[position],
                )
            )
        return records

    def _row_ids(self, repeats: Repeats, files: list[str], unit: Unit) -> RowIdsRecord:
        column = self._config.data.row_id
        assert column is not None, "without row ids there are no repeats"
        return RowIdsRecord(
            column=column,
            rows=repeats.rows,
            missing=repeats.missing,
            repeated=dict(repeats.repeated),
            remarks=repeats.remarks(column, files, unit),
        )


def _known(encoding: Encoding) -> int | None:
    """Categories, or buckets, that are not unseen."""
    if isinstance(encoding, Vocabulary):
        return len(encoding.categories)
    if isinstance(encoding, HashBuckets):
        touched = np.unpackbits(encoding.touched, bitorder="little")
        return int(touched[FIRST_ROW:].sum())
    return None

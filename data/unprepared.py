"""Rows that nobody prepared: one pass over the files that splits them and fits the features, and two ways to keep them.

In memory they are encoded once. Streamed, only the places of chunks are kept, and chunks are read and encoded again
whenever their rows are needed. Both give the same blocks in the same order, hence the same batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from data.bad_rows import BadRow
from data.block import BlockStore
from data.features.fit import FeaturesFit, merge_fits
from data.features.fitted import Features, encode_training, needs_fit
from data.features.raw import CellCounts, RawRows
from data.fingerprint import holds_out
from data.leaks import find_repeats
from data.memory import available_bytes, refuse_too_much
from data.quarantine import fewer
from data.reading import Reading
from data.scan import IdRuns, Scan
from data.sources.source import Source, Split, positions_of
from data.store import Encode, Kept, Streamed, UnseenValues
from erase_rec.config.schema import Config, FeaturesConfig

MERGE_BYTES = 512 * 2**20
"""Memory that merging stored vocabularies and comparing ids may take."""
_STORED_CHUNKS = 16
"""Chunks of a stored part of the fit."""

Collectors = dict[Split, Kept | Streamed]


@dataclass(frozen=True)
class BadRowsFound:
    """Rows that were left out because they could not be read.

    Attributes:
        count: how many.
        reasons: how many for each reason, the most frequent ones.
        rows: all of them, under the policy ``quarantine`` (so they have to fit into memory).
    """

    count: int
    reasons: dict[str, int]
    rows: list[BadRow]

    @classmethod
    def of(cls, scans: Sequence[Scan]) -> BadRowsFound:
        """What some scans found."""
        reasons = sum((scan.reasons for scan in scans), Counter[str]())
        return cls(sum(reasons.values()), fewer(reasons), [row for scan in scans for row in scan.bad])


@dataclass(frozen=True)
class HeldOutRows:
    """Rows to evaluate.

    Attributes:
        store: in file order.
        unseen: how many of their values are; of streamed rows, of those read so far.
        bad_rows: rows that could not be read.
    """

    store: BlockStore
    unseen: UnseenValues
    bad_rows: BadRowsFound


@dataclass(frozen=True)
class Unprepared:
    """What was read.

    Attributes:
        train: training rows.
        eval: held-out rows; None where none are to be held out. Its bad rows are those of all sources.
        features: as fitted on the training rows, or as given.
        num_rows: readable rows of the training source, held-out ones included.
        num_left_out: how many of them ``data.negative_sampling_rate`` left out.
        counts: of their cells.
        bad_rows: rows of all sources that could not be read.
        remarks: what a user should know of the rows' ids.
    """

    train: BlockStore
    eval: HeldOutRows | None
    features: Features
    num_rows: int
    num_left_out: int
    counts: CellCounts
    bad_rows: BadRowsFound
    remarks: list[str]


def read_unprepared(config: Config, train: Source, evaluation: Source | None, features: Features | None) -> Unprepared:
    """Reads all rows once.

    Args:
        config: checked, defaults filled in.
        train: rows of ``data.train``.
        evaluation: held-out rows that are no part of them; None: there are none, or ``data.split`` holds some out.
        features: already fitted; None: fit them on the training rows.

    Raises:
        DataError: the rows cannot be read as configured, do not fit into memory, or a row is on both sides of the
            split.
    """
    with _spilling(config) as folder:
        return _Pass(config, folder).run(train, evaluation, features)


def read_held_out(config: Config, train: Source | None, evaluation: Source | None, features: Features) -> HeldOutRows:
    """Reads the rows to evaluate alone; ids are not compared.

    Args:
        config: checked, defaults filled in.
        train: rows of ``data.train``, some of which ``data.split`` holds out; not read beside ``evaluation``.
        evaluation: rows that are no part of them.
        features: fitted.

    Raises:
        DataError: the rows cannot be read as configured, or do not fit into memory.
    """
    config = config.model_copy(update={"data": config.data.model_copy(update={"row_id": None})})
    with _spilling(config) as folder:
        return _Pass(config, folder).held_out(train, evaluation, features)


@contextmanager
def _spilling(config: Config) -> Iterator[Path | None]:
    """A folder for what may not fit into memory; None where rows are kept in memory anyway."""
    if config.data.reading == "memory":
        yield None
        return
    with TemporaryDirectory(prefix="erase-rec-") as folder:
        yield Path(folder)


class Fitting:
    """Fits features chunk by chunk."""

    def __init__(self, config: FeaturesConfig, folder: Path | None) -> None:
        """Takes a folder that parts of vocabularies are stored in; None: everything stays in memory."""
        self._config = config
        vocabularies = any(feature.encoding == "vocabulary" for feature in self._config.sparse)
        self._folder = folder if vocabularies else None  # all else takes as much memory for one chunk as for all
        self._fit, self._chunks = FeaturesFit(self._config), 0
        self._stored: list[Path] = []

    def add(self, rows: RawRows) -> None:
        """Adds the training rows of the next chunk."""
        self._fit.add(rows)
        self._chunks += 1
        if self._folder is not None and self._chunks == _STORED_CHUNKS:
            path = self._folder / f"fit-{len(self._stored):05d}.arrow"
            self._fit.write(path)
            self._stored.append(path)
            self._fit, self._chunks = FeaturesFit(self._config), 0

    def finish(self) -> Features:
        """The fitted features."""
        return merge_fits(self._config, [*self._stored, self._fit])


class _Pass:
    """A pass over the sources of a run."""

    def __init__(self, config: Config, folder: Path | None) -> None:
        """Takes a folder for what may not fit into memory; None: there is none."""
        self._config, self._folder, self._workers = config, folder, config.data.workers or 0
        self._ids = IdRuns(folder)
        self._scans: list[Scan] = []

    def run(self, train: Source, evaluation: Source | None, features: Features | None) -> Unprepared:
        """See :func:`read_unprepared`."""
        reading = Reading.of(self._config, train, "train")
        eval_reading = None if evaluation is None else self._reading_of_eval(evaluation)
        fitting = Fitting(self._config.features, self._folder) if features is None else None
        rows: Collectors = {
            "train": self._collector(reading, "train", self._early_encoding(features)),
            "eval": self._collector(reading, "eval", None if features is None else features.encode),
        }
        self._collect(reading, train, rows, fitting)
        if fitting is not None:
            features = fitting.finish()
        assert features is not None
        store = rows["train"].store(features, self._workers)
        held_out = None
        if evaluation is not None and eval_reading is not None:
            held_out = self._held_out_of(evaluation, eval_reading, features)
        elif holds_out(self._config.data):
            held_out = self._finished(rows["eval"], features)
        return Unprepared(
            train=store,
            eval=held_out,
            features=features,
            num_rows=self._scans[0].num_rows,
            num_left_out=self._scans[0].num_left_out,
            counts=self._scans[0].counts,
            bad_rows=BadRowsFound.of(self._scans),
            remarks=self._compare_ids(),
        )

    def held_out(self, train: Source | None, evaluation: Source | None, features: Features) -> HeldOutRows:
        """See :func:`read_held_out`."""
        if evaluation is not None:
            return self._held_out_of(evaluation, self._reading_of_eval(evaluation), features)
        assert train is not None
        return self._held_out_of(train, Reading.of(self._config, train, "train"), features)

    def _held_out_of(self, source: Source, reading: Reading, features: Features) -> HeldOutRows:
        rows = self._collector(reading, "eval", features.encode)
        self._collect(reading, source, {"eval": rows}, None)
        return self._finished(rows, features)

    def _finished(self, rows: Kept | Streamed, features: Features) -> HeldOutRows:
        unseen = UnseenValues(len(self._config.features.sparse))
        return HeldOutRows(rows.store(features, self._workers, unseen), unseen, BadRowsFound.of(self._scans))

    def _reading_of_eval(self, source: Source) -> Reading:
        """Looks for the columns now: the training rows come first, which may take long."""
        reading = Reading.of(self._config, source, "eval")
        positions_of(reading.columns, source.columns(), next((file.name for file in source.inputs()), "data.eval"))
        return reading

    def _early_encoding(self, features: Features | None) -> Encode | None:
        """Training rows need not wait for a fit that would not change them."""
        if features is not None:
            return features.encode
        config = self._config.features
        return None if needs_fit(config) else partial(encode_training, config)

    def _collector(self, reading: Reading, split: Split, encode: Encode | None) -> Kept | Streamed:
        return Kept(encode) if self._config.data.reading == "memory" else Streamed(reading, split)

    def _collect(self, reading: Reading, source: Source, rows: Collectors, fitting: Fitting | None) -> None:
        """Reads a source; rows of a split that nobody collects are passed over."""
        first_file = sum(1 + max(scan.files, default=-1) for scan in self._scans)
        scan = Scan(reading, source, workers=self._workers, first_file=first_file)
        self._scans.append(scan)
        read, total = 0, source.num_bytes()
        for chunk in scan:
            if fitting is not None and "train" in chunk.rows:
                fitting.add(chunk.rows["train"])
            for split in rows.keys() & chunk.rows.keys():
                rows[split].add(chunk.chunk, chunk.rows[split])
            self._ids.add(chunk.ids)
            read += chunk.chunk.num_bytes
            held = sum(each.held_bytes for each in rows.values())
            refuse_too_much(f"data.{reading.split}", held, read, total, available_bytes())

    def _compare_ids(self) -> list[str]:
        """What is to be said of rows with the same id.

        Raises:
            DataError: a held-out row has the id of a training row.
        """
        column = self._config.data.row_id
        if column is None:
            return []
        names = {position: name for scan in self._scans for position, name in scan.files.items()}
        files = [names.get(position, "") for position in range(1 + max(names, default=-1))]
        found = find_repeats(self._ids.all(), MERGE_BYTES)
        found.refuse_leaks(column, files, self._scans[0].unit)
        return found.remarks(column, files, self._scans[0].unit)

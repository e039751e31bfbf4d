"""The rows of a prepared folder, memory-mapped; what they are is in the manifest."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from data.ahead import in_order
from data.block import EncodedBlock
from data.errors import DataError
from data.features.encoding import IntArray
from data.features.fitted import Features
from data.fingerprint import differences, settings
from data.prepared.manifest import FEATURES, FileRecord, Manifest
from data.prepared.part import checksum, read_block
from erase_rec.config.schema import Config, FeaturesConfig

OPEN_PARTS = 128
"""Parts that stay open: each takes a file descriptor, of which a process has about a thousand."""


class PreparedStore:
    """Implements :class:`data.block.BlockStore` over the part files of a split.

    Arrays of a block point into the mapped files, which stay mapped as long as one of them is used.

    Attributes:
        block_rows: int64 [blocks].
        num_positive: rows whose label is 1.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: Literal["train", "eval"]) -> None:
        """Opens no part yet.

        Raises:
            DataError: a part is missing, or not of the size that was written.
        """
        record = manifest.splits[split]
        self._folder, self._manifest, self._parts = folder, manifest, record.parts
        self._features = FeaturesConfig.model_validate(manifest.settings["features"])
        self._part_starts = np.cumsum([0, *(len(part.blocks.rows) for part in record.parts)])
        self.block_rows: IntArray = np.array([rows for part in record.parts for rows in part.blocks.rows], np.int64)
        self.num_positive = record.positives
        self._readers: OrderedDict[int, pa.RecordBatchFileReader] = OrderedDict()
        self._lock = threading.Lock()
        for part in record.parts:
            check_size(folder, part.file)

    def read(self, block: int) -> EncodedBlock:
        """See :meth:`data.block.BlockStore.read`.

        Raises:
            DataError: the part cannot be read.
        """
        part, within, batch = self.batch(block)
        blocks = self._parts[part].blocks
        file = self._manifest.files[blocks.files[within]]
        try:
            found = read_block(batch, self._features, file, self._manifest.unit, blocks.firsts[within])
            is_whole = checksum(found) == blocks.crc32[within]
        except (pa.ArrowException, ValueError, TypeError, AttributeError, StopIteration) as error:
            raise self._damage(part, str(error)) from error
        if not is_whole:
            raise self._damage(part, f"block {within} is not as it was written: its checksum differs")
        return found

    def batch(self, block: int) -> tuple[int, int, pa.RecordBatch]:
        """The part that a block is in, its position there, and all its columns."""
        part = int(np.searchsorted(self._part_starts, block, side="right")) - 1
        within = block - int(self._part_starts[part])
        try:
            with self._lock:  # a reader is not made for several threads; reading a block's metadata is quick
                batch = self._reader(part, self._folder / self._parts[part].file.name).get_batch(within)
            batch.validate()  # that no column reaches beyond its bytes
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._damage(part, str(error)) from error
        return part, within, batch

    def _damage(self, part: int, what: str) -> DataError:
        path = self._folder / self._parts[part].file.name
        return DataError(
            f"{path}: not readable ({what.splitlines()[0] if what else 'no reason given'}); look for other damage with "
            f"erase-rec inspect {self._folder} --verify, or prepare the data again"
        )

    def _reader(self, part: int, path: Path) -> pa.RecordBatchFileReader:
        if part not in self._readers:
            self._readers[part] = pa.ipc.open_file(pa.memory_map(str(path)))
            if len(self._readers) > OPEN_PARTS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(part)
        return self._readers[part]


@dataclass(frozen=True)
class Prepared:
    """What a run needs of a prepared folder.

    Attributes:
        train: training rows.
        eval: held-out rows, in file order; None where none were.
        features: as fitted on the training rows.
        fingerprint: as of a run that reads the same files without preparation.
        missing: missing cells of each dense, then each sparse feature in the rows of ``data.train``, int64 [N + F].
        cells: all cells of them, int64 [N + F].
        num_clipped: numbers of the same rows clipped to float32's range.
        unseen: unseen values of each sparse feature in the held-out rows, int64 [F].
        values: all values of them, int64 [F].
        bad_rows: rows that were left out because they could not be read.
        manifest: all of it.
    """

    train: PreparedStore
    eval: PreparedStore | None
    features: Features
    fingerprint: str
    missing: IntArray
    cells: IntArray
    num_clipped: int
    unseen: IntArray
    values: IntArray
    bad_rows: int
    manifest: Manifest


def open_prepared(folder: Path, config: Config) -> Prepared:
    """Opens a prepared folder for a configuration; reads no row.

    Args:
        folder: where ``erase-rec prepare`` wrote.
        config: checked, defaults filled in. Its data, label, split and features must be those of the folder; the paths
            of files may differ or be left out.

    Raises:
        DataError: not a whole prepared folder, or one of other settings; names file or key.
    """
    manifest = Manifest.read(folder)
    try:
        return _open(folder, manifest, config)
    except DataError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        # The manifest's own checksum is right: somebody wrote it so.
        raise DataError(f"{folder}: the manifest contradicts itself ({error!r}); prepare the data again") from error


def _open(folder: Path, manifest: Manifest, config: Config) -> Prepared:
    _refuse_other_settings(folder, manifest, config)
    for file in manifest.fitted:
        check_size(folder, file)
    held_out = manifest.splits.get("eval")
    names = [feature.name for feature in config.features.sparse]
    return Prepared(
        train=PreparedStore(folder, manifest, "train"),
        eval=None if held_out is None else PreparedStore(folder, manifest, "eval"),
        features=Features.load(folder / FEATURES),
        fingerprint=manifest.fingerprint,
        missing=np.array([feature.missing for feature in manifest.features], dtype=np.int64),
        cells=np.array([feature.cells for feature in manifest.features], dtype=np.int64),
        num_clipped=sum(feature.clipped or 0 for feature in manifest.features),
        unseen=np.array([0 if held_out is None else held_out.unseen[name] for name in names], dtype=np.int64),
        values=np.array([0 if held_out is None else held_out.values[name] for name in names], dtype=np.int64),
        bad_rows=manifest.bad_rows.count,
        manifest=manifest,
    )


def damaged(folder: Path, manifest: Manifest) -> Iterator[FileRecord]:
    """Files that are missing or not as they were written; reads all of them."""
    files = list(manifest.all_files())
    whole = in_order(lambda file: file.is_whole(folder), files, workers=os.cpu_count() or 1, name="verify")
    yield from (file for file, is_whole in zip(files, whole, strict=True) if not is_whole)


def check_size(folder: Path, file: FileRecord) -> None:
    """Refuses a file that is missing or not of the size that was written.

    Raises:
        DataError: names the file.
    """
    path = folder / file.name
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}, but the manifest names it; prepare the data again") from None
    if found != file.num_bytes:
        raise DataError(
            f"{path}: has {found} bytes, the manifest says {file.num_bytes}: it is damaged; prepare the data again"
        )


def _refuse_other_settings(folder: Path, manifest: Manifest, config: Config) -> None:
    wanted = settings(config)
    prepared = manifest.settings
    if not manifest.bad_rows.count:
        prepared = prepared | {"data": prepared["data"] | {"bad_rows": wanted["data"]["bad_rows"]}}
    for key, found, there in differences(wanted, prepared):
        raise DataError(
            f"{key}: {_shown(found)} here, but {folder} was prepared with {_shown(there)}; take that setting, "
            "or prepare the data again in another folder"
        )
    if config.data.eval and not manifest.inputs.get("eval"):
        raise DataError(
            f"data.eval: names files, but {folder} was prepared without; leave it out, or prepare the data again"
        )
    checked = None if manifest.row_ids is None else manifest.row_ids.column
    if config.data.row_id not in (None, checked):
        raise DataError(
            f"data.row_id: {config.data.row_id!r} here, but {folder} was prepared with {_shown(checked)}; "
            "leave it out, or prepare the data again"
        )


def _shown(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        names = [str(item.get("name")) for item in value]
        return f"{len(names)} entries ({', '.join(names[:5])}{', ...' if names[5:] else ''})"
    return "null" if value is None else repr(value)

"""The features: fitted on the training rows, then the same transform for every row there is.

Fitting and encoding both go block by block. What fitting found is saved in the run folder, so that other files are
encoded identically later.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.errors import DataError
from data.features.bags import CellBags
from data.features.cells import BadCellError, Cells
from data.features.columns import cells_of, origin_of, placed, read_dense, read_sparse, subject_of
from data.features.dense import Standard, transform
from data.features.encoding import Encoding, IntArray
from data.features.hashing import HashBuckets
from data.features.id_range import IdRange
from data.features.label import read_labels
from data.features.vocabulary import Vocabulary
from data.sources.source import Block
from data.table import Bags, EncodedTable
from erase_rec.config.schema import FeaturesConfig, LabelConfig, SparseFeatureConfig

FORMAT = 1
STATE_FILE = "features.json"
ENCODINGS_FILE = "encodings.arrow"


@dataclass(frozen=True)
class Features:
    """Fitted features.

    Attributes:
        config: the features, defaults filled in.
        standards: moments of each dense feature; those of ``standardize`` are fitted.
        encodings: of each sparse feature.
    """

    config: FeaturesConfig
    standards: tuple[Standard, ...]
    encodings: tuple[Encoding, ...]

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each sparse feature's embedding table, by feature name."""
        return {
            feature.name: encoding.table_rows
            for feature, encoding in zip(self.config.sparse, self.encodings, strict=True)
        }

    def encode(self, block: Block, label_column: str, label: LabelConfig) -> EncodedTable:
        """Encodes rows.

        Raises:
            DataError: a cell or a column cannot be read; names file, line, column and the way out.
        """
        num_rows = block.columns.num_rows
        dense = np.empty((num_rows, len(self.config.dense)), dtype=np.float32)
        num_missing, num_clipped = [], []
        for position, (feature, standard) in enumerate(zip(self.config.dense, self.standards, strict=True)):
            values = read_dense(block, feature)
            num_missing.append(int(np.count_nonzero(np.isnan(values))))
            dense[:, position], clipped = transform(values, feature, standard)
            num_clipped.append(clipped)
        ids = np.empty((num_rows, sum(not feature.multi_valued for feature in self.config.sparse)), self._row_type)
        single = iter(ids.T)
        bags = {}
        for position, (category, encoding) in enumerate(zip(self.config.sparse, self.encodings, strict=True)):
            cells = read_sparse(block, category)
            num_missing.append(cells.num_missing)
            rows = _table_rows(block, category, encoding, cells)
            if isinstance(cells, CellBags):
                bags[position] = Bags(rows.astype(self._row_type), cells.offsets, cells.weights)
            else:
                next(single)[:] = rows
        with placed(block, f"label column {label_column!r}"):
            labels = read_labels(block.columns[label_column], label)
        return EncodedTable(
            dense=dense,
            ids=ids,
            bags=bags,
            label=labels,
            origins=(origin_of(block),),
            origin_starts=np.zeros(1, dtype=np.int64),
            num_missing=np.array(num_missing, dtype=np.int64),
            num_clipped=np.array(num_clipped, dtype=np.int64),
        )

    def empty(self) -> EncodedTable:
        """A table without rows."""
        single = sum(not feature.multi_valued for feature in self.config.sparse)
        return EncodedTable(
            dense=np.empty((0, len(self.config.dense)), dtype=np.float32),
            ids=np.empty((0, single), dtype=self._row_type),
            bags={
                position: Bags(
                    values=np.empty(0, dtype=self._row_type),
                    offsets=np.zeros(1, dtype=np.int64),
                    weights=None if feature.weights is None else np.empty(0, dtype=np.float32),
                )
                for position, feature in enumerate(self.config.sparse)
                if feature.multi_valued
            },
            label=np.empty(0, dtype=np.uint8),
            origins=(),
            origin_starts=np.empty(0, dtype=np.int64),
            num_missing=np.zeros(len(self.config.dense) + len(self.config.sparse), dtype=np.int64),
            num_clipped=np.zeros(len(self.config.dense), dtype=np.int64),
        )

    @property
    def _row_type(self) -> type[np.int32] | type[np.int64]:
        largest = max((encoding.table_rows for encoding in self.encodings), default=0)
        return np.int32 if largest <= np.iinfo(np.int32).max else np.int64

    def save(self, folder: Path) -> None:
        """Writes ``features.json`` and ``encodings.arrow`` into ``folder``, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "format": FORMAT,
            "features": self.config.model_dump(mode="json"),
            "standards": [asdict(standard) for standard in self.standards],
        }
        # One row, a list a feature: each feature's state has its own length.
        lists = [
            pa.LargeListArray.from_arrays(pa.array([0, len(found)], pa.int64()), found)
            for found in (encoding.state() for encoding in self.encodings)
        ]
        table = pa.table(lists, names=[str(position) for position in range(len(lists))])
        with pa.OSFile(str(folder / ENCODINGS_FILE), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        (folder / STATE_FILE).write_text(json.dumps(state, indent=1, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Features:
        """Takes over what :meth:`save` wrote.

        Raises:
            DataError: the files are not there, or of another version.
        """
        try:
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            with pa.OSFile(str(folder / ENCODINGS_FILE)) as source:
                table = pa.ipc.open_file(source).read_all()
        except (OSError, json.JSONDecodeError, pa.ArrowInvalid) as error:
            raise DataError(f"{folder}: the fitted features cannot be read ({error}); start the run again") from error
        if state.get("format") != FORMAT:
            raise DataError(
                f"{folder / STATE_FILE}: format {state.get('format')!r}, this version reads {FORMAT}; "
                "use the version that wrote it"
            )
        config = FeaturesConfig.model_validate(state["features"])
        standards = tuple(Standard(**moments) for moments in state["standards"])
        found = [column.combine_chunks().flatten() for column in table.columns]
        return cls(config, standards, tuple(map(_restore, config.sparse, found)))


def _table_rows(block: Block, feature: SparseFeatureConfig, encoding: Encoding, read: Cells | CellBags) -> IntArray:
    """Table row of each cell, int64 [cells]."""
    cells = cells_of(read)
    # A dictionary column may hold texts that none of these rows has: they must not be looked up, nor refused.
    used = np.flatnonzero(np.bincount(cells.codes, minlength=len(cells.texts)))
    with placed(block, subject_of(feature)):
        try:
            found = encoding.rows(cells.texts.take(pa.array(used)))
        except BadCellError as error:
            cell = int((cells.codes == used[error.row]).argmax())
            bag = int(np.searchsorted(read.offsets, cell, side="right")) - 1 if isinstance(read, CellBags) else cell
            raise BadCellError(bag, str(error)) from None
    rows_of = np.zeros(len(cells.texts), dtype=np.int64)
    rows_of[used] = found
    return rows_of[cells.codes]


def _restore(feature: SparseFeatureConfig, state: pa.Array) -> Encoding:
    match feature.encoding:
        case "hash":
            return HashBuckets.restore(state, size_of(feature))
        case "vocabulary":
            return Vocabulary(state)
        case "id":
            return IdRange(size_of(feature))


def size_of(feature: SparseFeatureConfig) -> int:
    """``num_embeddings`` of an encoding that needs it."""
    assert feature.num_embeddings is not None, "the configuration's rules demand num_embeddings"
    return feature.num_embeddings

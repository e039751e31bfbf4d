"""The features: fitted on the training rows, then the same transform for every row there is.

What fitting found is saved in the run folder, so that other files are encoded identically later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from data.block import Bags, EncodedBlock, RowArray
from data.digests import digest_of, digest_of_json
from data.errors import DataError
from data.features.arrays_file import numbers_of, read_arrays, write_arrays
from data.features.columns import size_of
from data.features.dense import Standard, transform
from data.features.hashing import HashBuckets, fill_buckets
from data.features.id_range import IdRange
from data.features.raw import RawRows, RawSparse
from data.features.vocabulary import Vocabulary
from erase_rec.config.schema import FeaturesConfig, SparseFeatureConfig

FORMAT = 3
DIGEST = "sha256"
"""Key of the state's own digest."""
STATE_FILE = "features.json"
ENCODINGS_FILE = "encodings.arrow"


class Encoding(Protocol):
    """A fitted map from categories to table rows; the same for training and evaluation."""

    @property
    def table_rows(self) -> int:
        """Rows of the embedding table: categories and the two special rows."""
        ...

    def encode(self, raw: RawSparse, fill: str | None) -> RowArray:
        """Table row of each value, int32 or int64 [R or V]; may be the array given.

        Args:
            raw: read by the same feature.
            fill: category that ``FILLED_ROW`` stands for; None or empty: there is none.
        """
        ...

    def state(self) -> dict[str, pa.Array]:
        """What fitting found, for the run folder."""
        ...


def needs_fit(config: FeaturesConfig) -> bool:
    """Whether training rows can be encoded only after all of them were read; else :func:`encode_training` does it."""
    return any(feature.encoding == "vocabulary" for feature in config.sparse) or any(
        feature.transform == "standardize" for feature in config.dense
    )


def encode_training(config: FeaturesConfig, raw: RawRows) -> EncodedBlock:
    """Encodes training rows before the features are fitted; :meth:`Features.encode` would give the same.

    Args:
        config: features that need no fit (:func:`needs_fit`): every bucket of a training row counts as touched.
        raw: R training rows.
    """
    assert not needs_fit(config), "vocabularies and moments are known after the fit only"
    rows = [_training_rows(feature, values) for feature, values in zip(config.sparse, raw.sparse, strict=True)]
    return _encoded(config, raw, [Standard()] * len(config.dense), rows)


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

    def encode(self, raw: RawRows) -> EncodedBlock:
        """Encodes R rows that were read by the same configuration. Refuses none: reading did. Thread-safe.

        How many cells were missing, and how many dense values are clipped, :func:`data.features.raw.count_cells` says
        of the raw rows; unseen are the values equal to ``UNSEEN_ROW``.
        """
        rows = [
            encoding.encode(values, feature.fill)
            for feature, encoding, values in zip(self.config.sparse, self.encodings, raw.sparse, strict=True)
        ]
        return _encoded(self.config, raw, self.standards, rows)

    def save(self, folder: Path) -> None:
        """Writes ``features.json`` and ``encodings.arrow`` into ``folder``, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {
            f"{name}/{position}": array
            for position, encoding in enumerate(self.encodings)
            for name, array in encoding.state().items()
        }
        write_arrays(folder / ENCODINGS_FILE, arrays)
        state = {
            "format": FORMAT,
            "features": self.config.model_dump(mode="json"),
            "standards": [asdict(standard) for standard in self.standards],
            ENCODINGS_FILE: digest_of(folder / ENCODINGS_FILE),
        }
        sealed = state | {DIGEST: digest_of_json(state)}
        (folder / STATE_FILE).write_text(json.dumps(sealed, indent=1, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *, verify: bool = True) -> Features:
        """Takes over what :meth:`save` wrote; the encodings are memory of the file, which processes share.

        Args:
            folder: where.
            verify: compare checksums, which reads all of it: another bit would be another category. False where the
                process that wrote the files is still at work on them.

        Raises:
            DataError: the files are not there, of another version, or not as they were written.
        """
        try:
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            if not isinstance(state, dict) or state.get("format") != FORMAT:
                found = state.get("format") if isinstance(state, dict) else None
                raise DataError(
                    f"{folder / STATE_FILE}: format {found!r}, this version reads {FORMAT}; "
                    "use the version that wrote it"
                )
            if verify and state.pop(DIGEST, None) != digest_of_json(state):
                raise DataError(_changed(folder / STATE_FILE))
            if verify and state[ENCODINGS_FILE] != digest_of(folder / ENCODINGS_FILE):
                raise DataError(_changed(folder / ENCODINGS_FILE))
            arrays, _ = read_arrays(folder / ENCODINGS_FILE)
            config = FeaturesConfig.model_validate(state["features"])
            standards = tuple(Standard(**moments) for moments in state["standards"])
            encodings = tuple(_restore(feature, position, arrays) for position, feature in enumerate(config.sparse))
        except DataError:
            raise
        except (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{folder}: the fitted features cannot be read ({error}); start the run again") from error
        return cls(config, standards, encodings)


def _changed(path: Path) -> str:
    return f"{path}: was changed after it was written (its checksum differs); copy it again, or start the run again"


def _encoded(
    config: FeaturesConfig, raw: RawRows, standards: Sequence[Standard], rows: Sequence[RowArray]
) -> EncodedBlock:
    """Puts a block together.

    Args:
        config: the features.
        raw: R rows.
        standards: of each dense feature.
        rows: table rows of each sparse feature's values.
    """
    ids, bags = [], {}
    for position, (feature, table_rows) in enumerate(zip(raw.sparse, rows, strict=True)):
        if feature.offsets is None:
            ids.append(table_rows)
        else:
            bags[position] = Bags(table_rows, feature.offsets, feature.weights)
    return EncodedBlock(
        dense=[transform(*column) for column in zip(raw.dense, config.dense, standards, strict=True)],
        ids=ids,
        bags=bags,
        label=raw.label,
        rows=raw.rows,
    )


def _training_rows(feature: SparseFeatureConfig, raw: RawSparse) -> RowArray:
    if feature.encoding == "hash":
        return fill_buckets(raw.values, size_of(feature), feature.fill)
    return IdRange(size_of(feature)).encode(raw, feature.fill)


def _restore(feature: SparseFeatureConfig, position: int, arrays: Mapping[str, pa.Array]) -> Encoding:
    match feature.encoding:
        case "hash":
            return HashBuckets(size_of(feature), numbers_of(arrays[f"touched/{position}"]))
        case "id":
            return IdRange(size_of(feature))
        case "vocabulary":
            names = ("categories", "hashes", "positions")
            return Vocabulary.restored({name: arrays[f"{name}/{position}"] for name in names})

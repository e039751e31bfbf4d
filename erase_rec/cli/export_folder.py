"""The folder that ``erase-rec export`` writes: its manifest, and the fitted features in files that programs can read.

``docs/export.md`` is the description for other programs. Imports neither torch nor the trainer, so that a server of an
export needs of this project its readers alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data.digests import digest_of
from data.features.columns import size_of
from data.features.dense import Standard
from data.features.encoding import FIRST_ROW, MISSING_ROW, UNSEEN_ROW
from data.features.fitted import Encoding, Features
from data.features.hashing import HashBuckets, hash_texts
from data.features.id_range import IdRange
from data.features.vocabulary import Vocabulary
from data.prepared.manifest import FileName
from erase_rec.config.schema import DenseFeatureConfig, FeaturesConfig, SparseFeatureConfig
from erase_rec.errors import UserError

FORMAT: Literal[1] = 1
MANIFEST = "manifest.json"
PROGRAM = "model.pt2"
AOT = "model.aoti.pt2"
ONNX = "model.onnx"
HASHED_TEXTS = ("", "a", "12345678", "123456789", "Grüße aus Köln")
"""Texts whose hashes the manifest holds, for other programs to try theirs on."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Part):
    """A file as it was written."""

    name: FileName
    bytes: int
    sha256: str


class DenseEntry(_Part):
    """A dense feature: its configuration, and for ``standardize`` the moments of the training rows."""

    config: DenseFeatureConfig
    mean: float = 0.0
    std: Annotated[float, Field(gt=0)] = 1.0


class SparseEntry(_Part):
    """A sparse feature: its configuration, its table, and the file of its categories (or of the buckets seen)."""

    config: SparseFeatureConfig
    table_rows: int
    embedding_dim: int
    file: FileName | None = None


class TensorEntry(_Part):
    """An input or output of the model; a size is a number or the name of one that varies."""

    name: str
    dtype: Literal["float32", "int64"]
    shape: tuple[int | str, ...]
    features: tuple[str, ...] = ()


class Check(_Part):
    """How far an exported program is from the trainer's model, over the same rows."""

    program: FileName
    rows: int
    of: str
    max_abs_difference: float
    tolerance: float


class Origin(_Part):
    """What was exported, and by what."""

    checkpoint: str
    config_hash: str
    data_fingerprint: str
    trained_in: str
    erase_rec: str
    torch: str
    made: str


class Manifest(_Part):
    """``manifest.json``."""

    format: Literal[1] = FORMAT
    origin: Origin
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]
    dense: tuple[DenseEntry, ...]
    sparse: tuple[SparseEntry, ...]
    special_rows: dict[str, int]
    hashes: dict[str, str]
    checks: tuple[Check, ...]
    files: tuple[FileRecord, ...]


@dataclass(frozen=True)
class ExportFolder:
    """An export that was opened.

    Attributes:
        path: the folder.
        manifest: its description.
        features: the transforms, the same as in training.
    """

    path: Path
    manifest: Manifest
    features: Features

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads the manifest and the features; every file is compared with its checksum.

        Raises:
            UserError: not an export, one of another format, or a file is missing or damaged.
        """
        manifest = read_manifest(path)
        for file in manifest.files:
            _verify(path, file)
        try:
            return cls(path, manifest, read_features(path, manifest))
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise UserError(f"{path}: the features cannot be read ({error}); export the run again") from error

    def has(self, name: str) -> bool:
        """Whether the export holds a file of that name."""
        return any(file.name == name for file in self.manifest.files)


def read_manifest(path: Path) -> Manifest:
    """The manifest of an export folder.

    Raises:
        UserError: there is none, it is damaged, or of another format.
    """
    file = path / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} is no export: {MANIFEST} cannot be read ({error.strerror}); "
            "write one with: erase-rec export --checkpoint RUN_FOLDER --out FOLDER"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error}); export the run again") from error
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise UserError(
            f"{file}: format {content.get('format')!r}, this version reads {FORMAT}; export the run with this version, "
            "or use the one that wrote it"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise UserError(f"{file}: {where}: {first['msg']}; export the run again") from error


def write_features(
    path: Path, features: Features, embedding_dims: Sequence[int]
) -> tuple[list[DenseEntry], list[SparseEntry]]:
    """Writes the features' files into ``path`` and gives their entries of the manifest.

    A vocabulary becomes a Parquet file with one column ``category``, whose row i has table row i + 2. The buckets that
    training touched become a file of bits, those of table row r being bit r % 8 (1: touched) of byte r // 8.
    """
    dense = [
        DenseEntry(config=config, mean=standard.mean, std=standard.std)
        for config, standard in zip(features.config.dense, features.standards, strict=True)
    ]
    sparse = []
    parts = zip(features.config.sparse, features.encodings, embedding_dims, strict=True)
    for position, (config, encoding, dim) in enumerate(parts):
        file = None
        if isinstance(encoding, Vocabulary):
            file = f"vocabulary_{position:03d}.parquet"
            pq.write_table(pa.table({"category": encoding.categories}), path / file, compression="zstd")
        elif isinstance(encoding, HashBuckets):
            file = f"seen_{position:03d}.bin"
            (path / file).write_bytes(encoding.touched.tobytes())
        sparse.append(SparseEntry(config=config, table_rows=encoding.table_rows, embedding_dim=dim, file=file))
    return dense, sparse


def read_features(path: Path, manifest: Manifest) -> Features:
    """The features that :func:`write_features` wrote.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is not of its feature.
    """
    config = FeaturesConfig(
        dense=tuple(entry.config for entry in manifest.dense), sparse=tuple(entry.config for entry in manifest.sparse)
    )
    standards = tuple(Standard(entry.mean, entry.std) for entry in manifest.dense)
    encodings = tuple(_read_encoding(path, entry) for entry in manifest.sparse)
    for entry, encoding in zip(manifest.sparse, encodings, strict=True):
        if encoding.table_rows != entry.table_rows:
            raise ValueError(f"feature {entry.config.name!r}: {encoding.table_rows} table rows, not {entry.table_rows}")
    return Features(config, standards, encodings)


def _read_encoding(path: Path, entry: SparseEntry) -> Encoding:
    if entry.config.encoding == "id":
        return IdRange(size_of(entry.config))
    if entry.file is None:
        raise ValueError(f"feature {entry.config.name!r} has no file")
    if entry.config.encoding == "vocabulary":
        categories = pq.read_table(path / entry.file)["category"].combine_chunks()
        return Vocabulary.of(categories.cast(pa.large_string()))
    touched = np.frombuffer((path / entry.file).read_bytes(), dtype=np.uint8)
    if len(touched) != -(-entry.table_rows // 8):
        raise ValueError(f"feature {entry.config.name!r}: {len(touched)} bytes of buckets")
    return HashBuckets(size_of(entry.config), touched)


def hashes_of_texts() -> dict[str, str]:
    """64-bit hashes of :data:`HASHED_TEXTS`, hexadecimal."""
    hashes = hash_texts(pa.array(HASHED_TEXTS, pa.large_string()))
    return {text: f"{value:016x}" for text, value in zip(HASHED_TEXTS, hashes.tolist(), strict=True)}


def special_rows() -> dict[str, int]:
    """Table rows with a meaning of their own, and the first of the categories'."""
    return {"missing": MISSING_ROW, "unseen": UNSEEN_ROW, "first_category": FIRST_ROW}


def tensors_of(features: FeaturesConfig) -> tuple[Sequence[TensorEntry], Sequence[TensorEntry]]:
    """Inputs and outputs of the model, in order."""
    single = tuple(feature.name for feature in features.sparse if not feature.multi_valued)
    dense = tuple(feature.name for feature in features.dense)
    inputs = [
        TensorEntry(name="dense", dtype="float32", shape=("rows", len(dense)), features=dense),
        TensorEntry(name="ids", dtype="int64", shape=("rows", len(single)), features=single),
    ]
    for number, feature in enumerate(feature for feature in features.sparse if feature.multi_valued):
        of: dict[str, Any] = {"features": (feature.name,)}
        inputs.append(TensorEntry(name=f"bag_{number}_rows", dtype="int64", shape=(f"values_{number}",), **of))
        inputs.append(TensorEntry(name=f"bag_{number}_lengths", dtype="int64", shape=("rows",), **of))
        if feature.weights is not None:
            weights = TensorEntry(name=f"bag_{number}_weights", dtype="float32", shape=(f"values_{number}",), **of)
            inputs.append(weights)
    outputs = [TensorEntry(name=name, dtype="float32", shape=("rows",)) for name in ("probability", "logit")]
    return inputs, outputs


def record(path: Path, name: str) -> FileRecord:
    """Size and checksum of a file of the folder.

    Raises:
        OSError: it cannot be read.
    """
    return FileRecord(name=name, bytes=(path / name).stat().st_size, sha256=digest_of(path / name))


def _verify(path: Path, expected: FileRecord) -> None:
    try:
        found = record(path, expected.name)
    except OSError as error:
        raise UserError(f"{path / expected.name}: cannot be read ({error.strerror}); export the run again") from error
    if found != expected:
        raise UserError(f"{path / expected.name}: not the file that was written (its checksum differs); export again")

"""Fitting the features: what training rows say about moments, touched buckets and vocabularies.

Each chunk's training rows are looked at once, in any process; what they say is kept in memory or stored, and merged
in the order of the chunks. The merged features do not depend on which chunks were looked at together, or where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.features.arrays_file import read_arrays, write_arrays
from data.features.cells import FloatArray
from data.features.columns import size_of
from data.features.counts import MERGE_BYTES, CategoryCounts, Counted, Partitioned, frequent_categories
from data.features.dense import Moments, Standard, moments_of
from data.features.encoding import FILLED_ROW, FIRST_ROW, narrow_rows
from data.features.fitted import Encoding, Features
from data.features.hashing import HashBuckets, fill_buckets, no_bucket, touch
from data.features.id_range import IdRange
from data.features.raw import RawRows, RawSparse
from data.features.vocabulary import Vocabulary
from erase_rec.config.schema import FeaturesConfig

COMPACT_BYTES_PER_BIT = 64
"""A position takes 4 or 8 bytes and some time to find: it must spare several times as many."""

Opener = Callable[[Sequence[str]], Mapping[str, pa.Array]]
"""Gives the named arrays of a part's state."""


class FeaturesFit:
    """Collects what training rows say of the features."""

    def __init__(self, config: FeaturesConfig) -> None:
        """Takes the features, defaults filled in."""
        self._config = config
        self._moments: dict[int, list[FloatArray]] = {
            position: [] for position, feature in enumerate(config.dense) if feature.transform == "standardize"
        }
        self._touched: dict[int, npt.NDArray[np.uint8]] = {}
        self._counts: dict[int, CategoryCounts] = {}
        for position, feature in enumerate(config.sparse):
            if feature.encoding == "hash":
                self._touched[position] = no_bucket(size_of(feature))
            elif feature.encoding == "vocabulary":
                self._counts[position] = CategoryCounts()

    def add(self, raw: RawRows) -> None:
        """Adds the training rows of one chunk, all of them at once; chunks come in order."""
        for position, found in self._moments.items():
            found.append(moments_of(raw.dense[position]))
        for position, bits in self._touched.items():
            feature = self._config.sparse[position]
            touch(bits, fill_buckets(raw.sparse[position].values, size_of(feature), feature.fill))
        for position, counts in self._counts.items():
            _count(counts, raw.sparse[position], self._config.sparse[position].fill)

    def write(self, path: Path) -> None:
        """Stores what the rows said so far, for :func:`merge_fits`."""
        write_arrays(path, self.state())

    def state(self) -> dict[str, pa.Array]:
        """What :meth:`write` stores."""
        state: dict[str, pa.Array] = {}
        for position, found in self._moments.items():
            state[f"moments/{position}"] = pa.array(np.concatenate([np.empty(0), *found]))
        for position, bits in self._touched.items():
            state[f"touched/{position}"] = pa.array(_compact(bits))
        for position, counts in self._counts.items():
            parts = Partitioned.of(counts.finish())
            state[f"texts/{position}"] = parts.entries.texts
            state[f"counts/{position}"] = pa.array(parts.entries.counts)
            state[f"starts/{position}"] = pa.array(parts.starts)
        return state


def vocabularies_of(config: FeaturesConfig) -> list[int]:
    """Positions of the sparse features that have a vocabulary."""
    return [position for position, feature in enumerate(config.sparse) if feature.encoding == "vocabulary"]


def merge_vocabulary(config: FeaturesConfig, position: int, parts: Sequence[Path], memory_bytes: int) -> Vocabulary:
    """Fits the sparse feature at ``position`` to all training rows; arguments as of :func:`merge_fits`."""
    return _merge_vocabulary(config, position, [_opener(part) for part in parts], memory_bytes)


def merge_fits(
    config: FeaturesConfig,
    parts: Sequence[Path | FeaturesFit],
    memory_bytes: int = MERGE_BYTES,
    vocabularies: Mapping[int, Vocabulary] | None = None,
) -> Features:
    """Fits the features to all training rows.

    Args:
        config: of all parts.
        parts: what the chunks said, in their order; in memory, or where :meth:`FeaturesFit.write` stored it.
        memory_bytes: how much merging a vocabulary may take, besides the vocabularies themselves; where that is not
            enough for all that is stored, several passes each merge a share of the texts.
        vocabularies: those of :func:`merge_vocabulary`, by position, where all were merged already.
    """
    opened = [_opener(part) for part in parts]
    moments, touched = _merge_small(config, opened)
    encodings: list[Encoding] = []
    for position, feature in enumerate(config.sparse):
        match feature.encoding:
            case "hash":
                encodings.append(HashBuckets(size_of(feature), touched[position]))
            case "id":
                encodings.append(IdRange(size_of(feature)))
            case "vocabulary":
                encodings.append(
                    _merge_vocabulary(config, position, opened, memory_bytes)
                    if vocabularies is None
                    else vocabularies[position]
                )
    standards = tuple(
        moments[position].finish() if position in moments else Standard() for position in range(len(config.dense))
    )
    return Features(config, standards, tuple(encodings))


def _opener(part: Path | FeaturesFit) -> Opener:
    """Looks into a part, once or often; a file is not kept open, since there may be many thousands."""
    if isinstance(part, Path):
        return lambda names: read_arrays(part, names)[0]
    state = part.state()
    return lambda names: state


def _merge_small(
    config: FeaturesConfig, parts: Sequence[Opener]
) -> tuple[dict[int, Moments], dict[int, npt.NDArray[np.uint8]]]:
    """Moments and touched buckets, by the feature's position among the dense and among the sparse ones."""
    moments = {at: Moments() for at, feature in enumerate(config.dense) if feature.transform == "standardize"}
    touched = {
        at: no_bucket(size_of(feature)) for at, feature in enumerate(config.sparse) if feature.encoding == "hash"
    }
    names = [f"moments/{position}" for position in moments] + [f"touched/{position}" for position in touched]
    for part in parts if names else ():
        state = part(names)
        for position, merged in moments.items():
            for found in state[f"moments/{position}"].to_numpy().reshape(-1, 3):
                merged.add(found)
        for position, bits in touched.items():
            found = state[f"touched/{position}"].to_numpy()
            if found.dtype == np.uint8:
                bits |= found
            else:
                touch(bits, found)
    return moments, touched


def _merge_vocabulary(config: FeaturesConfig, position: int, parts: Sequence[Opener], memory_bytes: int) -> Vocabulary:
    feature = config.sparse[position]
    counts = [partial(_counts_of, part, position) for part in parts]
    return Vocabulary.of(frequent_categories(counts, feature.min_count, feature.num_embeddings, memory_bytes))


def _counts_of(part: Opener, position: int) -> Partitioned:
    names = [f"{name}/{position}" for name in ("texts", "counts", "starts")]
    state = part(names)
    texts, counts, starts = (state[name] for name in names)
    return Partitioned(Counted(texts, counts.to_numpy()), starts.to_numpy())


def _count(counts: CategoryCounts, raw: RawSparse, fill: str | None) -> None:
    assert raw.texts is not None, "read as a vocabulary"
    occurrences = np.bincount(raw.values, minlength=FIRST_ROW + len(raw.texts))
    counts.add(Counted.occurring(raw.texts, occurrences[FIRST_ROW:]))
    if fill:
        counts.add(Counted.occurring(pa.array([fill], pa.large_string()), occurrences[FILLED_ROW:FIRST_ROW]))


def _compact(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8 | np.int32 | np.int64]:
    """The bits, or the positions of those that are set where these take much less room."""
    if COMPACT_BYTES_PER_BIT * int(np.bitwise_count(bits).sum(dtype=np.int64)) > len(bits):
        return bits
    used = np.flatnonzero(bits)
    row, bit = np.nonzero(np.unpackbits(bits[used], bitorder="little").reshape(-1, 8))
    return narrow_rows(used[row] * 8 + bit, 8 * len(bits))

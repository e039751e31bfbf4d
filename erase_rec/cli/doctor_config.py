"""What ``erase-rec doctor`` says of a configuration: its problems, its data, and whether its tables fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import DataError
from data.features.columns import column_of, size_of
from data.features.encoding import FIRST_ROW
from data.fingerprint import holds_out
from data.inspection import STATE_FLOATS
from data.prepared.store import open_prepared
from data.reading import Reading, open_eval, open_train
from data.registry import WITHOUT_FILES
from data.sources.paths import resolve
from data.sources.source import Source, Split, positions_of
from erase_rec.api.assembly import ContentCatalog
from erase_rec.cli.doctor_machine import Check, Seen, in_gib
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config, SparseFeatureConfig
from erase_rec.environment import triple_problem
from erase_rec.errors import ConfigError

NEARLY_ALL = 0.8
"""Share of the memory from which tables leave little for the rest."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        checks: in a fixed order.
        config: None where it has problems.
    """

    checks: list[Check]
    config: Config | None


def diagnose_config(name: str, overrides: Sequence[str]) -> Diagnosis:
    """Loads a configuration; each of its problems is a check.

    Raises:
        UserError: there is no such file.
    """
    try:
        loaded = load_config(name, list(overrides), catalog=ContentCatalog())
    except ConfigError as error:
        return Diagnosis([Check.of_error("config", problem) for problem in error.problems], None)
    return Diagnosis([Check("config", "ok", str(loaded.path))], loaded.config)


def config_checks(config: Config, seen: Seen) -> list[Check]:
    """Judges a configuration on this machine; reads headers, schemas and manifests, but no rows."""
    checks = [_device(config, seen), _backend(config, seen)]
    table_rows: dict[str, int] = {}
    if config.data.prepared is not None:
        checks.append(_prepared(config, table_rows))
    elif config.data.kind == "pandas":
        checks.append(Check("data", "ok", "rows come from DataFrames, in Python"))
    else:
        checks += _files(config, seen)
    return [*checks, _tables(config, table_rows, seen), _ids(config)]


def _device(config: Config, seen: Seen) -> Check:
    wanted = config.train.device
    if wanted == "cuda" and not seen.gpus:
        return Check("device", "problem", "train.device: cuda, and torch sees no CUDA device", "use train.device=cpu")
    on_cuda = wanted != "cpu" and bool(seen.gpus)
    found = f"train.device: {wanted}, so it trains on {seen.gpus[0].name if on_cuda else 'the CPU'}"
    if wanted == "cpu" and seen.gpus:
        return Check("device", "warning", f"{found}, beside a GPU", "use train.device=auto")
    if not on_cuda and config.train.precision == "bf16":
        return Check("device", "warning", f"{found}, where bf16 is slow", "use train.precision=fp32")
    return Check("device", "ok", found)


def _backend(config: Config, seen: Seen) -> Check:
    wanted = config.embedding.backend
    problem = triple_problem(seen.versions) or seen.torchrec_error
    if wanted == "torchrec" and problem:
        return Check("backend", "problem", f"embedding.backend: torchrec: {problem}", "use embedding.backend=torch")
    used = "torch" if wanted == "torch" or problem else "torchrec"
    return Check("backend", "ok", f"embedding.backend: {wanted}" + (f", so {used}" if used != wanted else ""))


def _prepared(config: Config, table_rows: dict[str, int]) -> Check:
    """Notes the tables' rows, which a prepared folder knows."""
    folder = Path(str(config.data.prepared))
    try:
        found = open_prepared(folder, config)
    except DataError as error:
        return Check.of_error("data", str(error))
    table_rows |= found.features.table_rows
    held_out = 0 if found.eval is None else int(found.eval.block_rows.sum())
    rows = f"{int(found.train.block_rows.sum()):,} training rows and {held_out:,} held out"
    if not held_out:
        return Check("data", "warning", f"{folder}: {rows}", "without held-out rows there is no NE and no AUC")
    return Check("data", "ok", f"{folder}: {rows}")


def _files(config: Config, seen: Seen) -> Iterator[Check]:
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        name = f"data.{split}"
        try:
            source = open_train(config) if split == "train" else open_eval(config)
            if source is None:
                yield _held_out(config)
                continue
            reading = Reading.of(config, source, split)
            files = source.inputs()
            positions_of(reading.columns, source.columns(), files[0].name if files else name)
        except DataError as error:
            yield Check.of_error(name, str(error))
            continue
        yield _size(config, name, source, seen)


def _held_out(config: Config) -> Check:
    if holds_out(config.data):
        how = f"{config.data.eval_fraction:.0%} of the training rows" if config.data.eval_fraction else "some"
        return Check("data.eval", "ok", f"{how}, by {config.data.split.by}")
    way_out = "hold some out for NE and AUC: data.eval_fraction=0.1"
    return Check("data.eval", "warning", "no rows are held out", way_out)


def _size(config: Config, name: str, source: Source, seen: Seen) -> Check:
    if config.data.kind in WITHOUT_FILES:
        return Check(name, "ok", f"kind {config.data.kind} makes its rows up")
    num_bytes, files = source.num_bytes(), len(source.inputs())
    found = f"{files} {'file' if files == 1 else 'files'}, {in_gib(num_bytes)}; all columns are there"
    kept = config.data.reading == "memory"
    if kept and seen.memory_bytes is not None and num_bytes > seen.memory_bytes:
        way_out = "prepare them (erase-rec prepare), or use data.reading=stream"
        return Check(name, "warning", f"{found}; more than the {in_gib(seen.memory_bytes)} of free memory", way_out)
    return Check(name, "ok", found)


def _tables(config: Config, table_rows: dict[str, int], seen: Seen) -> Check:
    known = {feature.name: _rows_of(feature, table_rows) for feature in config.features.sparse}
    each, of_dim = STATE_FLOATS[config.optimizer.sparse.kind]
    num_bytes = 0
    for feature in config.features.sparse:
        dim = feature.embedding_dim or config.embedding.dim
        num_bytes += 4 * (known[feature.name] or 0) * (dim + each + of_dim * dim)
    open_ended = [name for name, rows in known.items() if rows is None]
    parts = [f"{in_gib(num_bytes)} with the optimizer's state"] if num_bytes or not open_ended else []
    if open_ended:
        shown = ", ".join(open_ended[:3]) + (" ..." if len(open_ended) > 3 else "")
        parts.append(f"{len(open_ended)} vocabularies whose size the data will tell ({shown})")
    found = " and ".join(parts)
    on_cuda = config.train.device != "cpu" and bool(seen.gpus)
    room = seen.gpus[0].free_bytes if on_cuda else seen.memory_bytes
    if room is None or num_bytes <= NEARLY_ALL * room:
        return Check("tables", "ok", found)
    found += f"; {in_gib(room)} are free {'on the GPU' if on_cuda else 'in memory'}"
    way_out = "lower embedding.dim or num_embeddings, raise min_count, or use a smaller optimizer.sparse.kind"
    return Check("tables", "problem" if num_bytes > room else "warning", found, way_out)


def _rows_of(feature: SparseFeatureConfig, table_rows: dict[str, int]) -> int | None:
    """Rows of a table, or the most that it can have; None: the data decide."""
    if feature.name in table_rows:
        return table_rows[feature.name]
    return None if feature.num_embeddings is None else FIRST_ROW + feature.num_embeddings


def _ids(config: Config) -> Check:
    """Least and greatest id where Parquet's statistics tell them."""
    numbered = [feature for feature in config.features.sparse if feature.encoding == "id"]
    if not numbered:
        return Check("ids", "ok", "no feature has encoding: id")
    if config.data.kind != "parquet" or config.data.prepared is not None:
        return Check("ids", "ok", "checked when the rows are read")
    ranges: dict[str, tuple[int, int]] = {}
    try:
        for file in resolve([*config.data.train, *config.data.eval]):
            with file.open() as stream:
                metadata = pq.read_metadata(stream)
            for feature in numbered:
                for low, high in _ranges(metadata, column_of(feature)):
                    least, greatest = ranges.get(feature.name, (low, high))
                    ranges[feature.name] = min(least, low), max(greatest, high)
    except (DataError, pa.ArrowException) as error:
        return Check("ids", "warning", f"their ranges cannot be read: {str(error).splitlines()[0]}", "see data.train")
    for feature in numbered:
        low, high = ranges.get(feature.name, (0, 0))
        if low < 0 or high >= size_of(feature):
            found = f"feature {feature.name!r} holds ids from {low} to {high}, expected 0 to {size_of(feature) - 1}"
            way_out = f"set num_embeddings: {high + 1}" if low >= 0 else "use encoding: vocabulary or hash"
            return Check("ids", "problem", found, way_out)
    shown = ", ".join(f"{name} {low} to {high}" for name, (low, high) in list(ranges.items())[:5])
    return Check("ids", "ok", f"within their tables: {shown}" if shown else "checked when the rows are read")


def _ranges(metadata: pq.FileMetaData, column: str) -> Iterator[tuple[int, int]]:
    """Least and greatest value of a column, or of its lists, in each row group that says so."""
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for position in range(row_group.num_columns):
            chunk = row_group.column(position)
            if chunk.path_in_schema == column or chunk.path_in_schema.startswith(f"{column}.list."):
                statistics = chunk.statistics
                if statistics is not None and statistics.has_min_max and isinstance(statistics.min, int):
                    yield statistics.min, statistics.max

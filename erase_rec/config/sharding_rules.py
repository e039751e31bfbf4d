"""Rules on how tables are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from erase_rec.config.document import KeyPath
from erase_rec.config.rules import Finding, Rule
from erase_rec.config.schema import Config, TableShardingConfig
from erase_rec.errors import nearest

SHARDING: KeyPath = ("embedding", "sharding")
TABLES: KeyPath = ("embedding", "tables")
KERNEL_COLUMNS = 4
"""FBGEMM's kernels take columns in groups of so many."""


def _entries(config: Config) -> Iterator[tuple[KeyPath, TableShardingConfig, str]]:
    """Path and entry of each table that is named, and how it is spread."""
    for position, entry in enumerate(config.embedding.tables):
        yield (*TABLES, position), entry, entry.sharding or config.embedding.sharding


def _about_nothing(config: Config) -> Iterator[Finding]:
    if config.embedding.tables and config.embedding.sharding == "replicated":
        yield Finding(TABLES, "is given and embedding.sharding is replicated", also=(SHARDING,))


def _unknown_tables(config: Config) -> Iterator[Finding]:
    features = [feature.name for feature in config.features.sparse]
    seen: set[str] = set()
    for path, entry, _ in _entries(config):
        if entry.name not in features:
            found = f"no sparse feature is named {entry.name!r}"
            yield Finding((*path, "name"), found, also=(("features", "sparse"),), hint=nearest(entry.name, features))
        elif entry.name in seen:
            yield Finding((*path, "name"), f"the table {entry.name!r} is listed before")
        seen.add(entry.name)


def _without_torchrec(config: Config) -> Iterator[Finding]:
    if config.embedding.backend == "torch" and config.embedding.sharding != "replicated":
        found = f"is torch and sharding is {config.embedding.sharding}"
        yield Finding(("embedding", "backend"), found, also=(SHARDING,))


def _exchanged_in_a_step_graph(config: Config) -> Iterator[Finding]:
    if config.schedule.cuda_graph == "step" and config.embedding.sharding != "replicated":
        found = f"is step and embedding.sharding is {config.embedding.sharding}"
        yield Finding(("schedule", "cuda_graph"), found, also=(SHARDING, ("schedule", "preset")))


def _split_row_statistics(config: Config) -> Iterator[Finding]:
    if config.optimizer.sparse.kind != "rowwise_adagrad":
        return
    kind: KeyPath = ("optimizer", "sparse", "kind")
    if config.embedding.sharding == "column_wise":
        yield Finding(SHARDING, "is column_wise and optimizer.sparse.kind is rowwise_adagrad", also=(kind,))
    for path, entry, _ in _entries(config):
        if entry.sharding == "column_wise":
            found = "is column_wise and optimizer.sparse.kind is rowwise_adagrad"
            yield Finding((*path, "sharding"), found, also=(kind,))


def _widths(config: Config) -> Iterator[Finding]:
    dims = {feature.name: feature.embedding_dim or config.embedding.dim for feature in config.features.sparse}
    for path, entry, sharding in _entries(config):
        width, key = entry.column_width, (*path, "column_width")
        if width is None:
            continue
        if sharding != "column_wise":
            yield Finding(key, f"is given and the table's sharding is {sharding}", also=((*path, "sharding"), SHARDING))
        elif entry.name in dims and (dims[entry.name] % width or width % KERNEL_COLUMNS):
            found = f"is {width}, of a table of {dims[entry.name]} columns"
            yield Finding(key, found, also=(("features", "sparse"), ("embedding", "dim")))


def _kernels(config: Config) -> Iterator[Finding]:
    for path, entry, sharding in _entries(config):
        if entry.kernel is not None and sharding == "data_parallel":
            also = ((*path, "sharding"), SHARDING)
            yield Finding((*path, "kernel"), f"is {entry.kernel} and the table's sharding is data_parallel", also=also)
        elif entry.kernel in {"fused_uvm", "fused_uvm_caching"} and config.train.device == "cpu":
            yield Finding((*path, "kernel"), f"is {entry.kernel} and train.device is cpu", also=(("train", "device"),))


def _caches(config: Config) -> Iterator[Finding]:
    for path, entry, _ in _entries(config):
        if entry.cache_share is not None and entry.kernel != "fused_uvm_caching":
            found = f"is {entry.cache_share:g} and the table's kernel is {entry.kernel or 'fused'}"
            yield Finding((*path, "cache_share"), found, also=((*path, "kernel"),))


SHARDING_RULES = (
    Rule(
        "`embedding.tables` with `embedding.sharding: replicated`",
        "every rank holds all of every table",
        "use embedding.sharding: auto, or leave tables out",
        _about_nothing,
    ),
    Rule(
        "`embedding.tables` with a name that is no sparse feature's, or twice the same",
        "a table goes by its feature's name",
        "name each feature once",
        _unknown_tables,
    ),
    Rule(
        "`embedding.backend: torch` with a `sharding` other than `replicated`",
        "tables are planned and exchanged by TorchRec",
        "use embedding.backend: auto, or sharding: replicated",
        _without_torchrec,
    ),
    Rule(
        "`cuda_graph: step` with a `sharding` other than `replicated`",
        "ranks tell each other through their hosts how many ids they exchange, which no capture can hold",
        "use cuda_graph: dense, or embedding.sharding: replicated",
        _exchanged_in_a_step_graph,
    ),
    Rule(
        "`sharding: column_wise` with `optimizer.sparse.kind: rowwise_adagrad`",
        "each part of a row would have a learning rate of its own: another optimizer than on one rank",
        "use optimizer.sparse.kind: adagrad, or another sharding",
        _split_row_statistics,
    ),
    Rule(
        "`column_width` without `sharding: column_wise`, or one that does not divide the table's columns",
        f"parts have equal widths, multiples of {KERNEL_COLUMNS}",
        "use sharding: column_wise and a divisor of the table's columns",
        _widths,
    ),
    Rule(
        "a `kernel` of a `data_parallel` table, or one that needs CUDA with `train.device: cpu`",
        "nothing would run it",
        "leave kernel out",
        _kernels,
    ),
    Rule(
        "`cache_share` without `kernel: fused_uvm_caching`",
        "rows of the other kernels lie in one place",
        "use kernel: fused_uvm_caching, or leave cache_share out",
        _caches,
    ),
)

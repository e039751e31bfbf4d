"""One table in many files, encodings and types: prepared as what it is, and read back with each row once an epoch."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_cases import assert_same_rows, reading_from, run

from data.dataset import build_datasets
from data.prepared.manifest import Manifest
from data.sources import text_file
from erase_rec.config.schema import Config

ROWS = 1000
LINES = [f"{row % 3 // 2},{row},c{row % 7}" for row in range(ROWS)]
BOM = b"\xef\xbb\xbf"


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(text_file, "CHUNK_BYTES", 1 << 10)
        monkeypatch.setattr(text_file, "READ_BYTES", 1 << 9)
        yield


def config_of(train: Path, features: dict[str, Any] | None = None, *, batch: int = 64, **data: Any) -> Config:
    section = {"kind": "csv", "train": str(train), "label": {"column": "label"}, "shuffle_window": 200}
    columns = {"dense": [{"name": "x", "transform": "none"}], "sparse": [{"name": "c", "encoding": "vocabulary"}]}
    return Config.model_validate(
        {
            "data": section | data,
            "features": features or columns,
            "towers": [{"name": "only", "kind": "mlp"}],
            "train": {"epochs": 1, "local_batch_size": batch},
        }
    )


def write_files(folder: Path, num_files: int) -> Path:
    for number in range(num_files):
        (folder / f"{number}.csv").write_text("\n".join(["label,x,c", *LINES[number::num_files], ""]))
    return folder / "*.csv"


@pytest.mark.parametrize(("num_files", "ranks"), [(1, 2), (5, 1)])
def test_workers_files_and_ranks_multiply_no_prepared_rows(tmp_path: Path, num_files: int, ranks: int) -> None:
    """Others give each worker, and each rank, all files."""
    config = config_of(write_files(tmp_path, num_files), batch=50 // ranks)
    manifest = run(config, tmp_path / "out", workers=2)
    assert manifest.rows_read == manifest.splits["train"].rows == ROWS
    for workers in (0, 3, 7):
        chosen = reading_from(config, tmp_path / "out")
        chosen = chosen.model_copy(update={"data": chosen.data.model_copy(update={"workers": workers})})
        loaders = [build_datasets(chosen, rank=rank, world_size=ranks).train for rank in range(ranks)]
        orders = []
        for epoch in range(2):
            parts = [[x for batch in loader.batches(epoch) for x in batch.dense[:, 0].tolist()] for loader in loaders]
            assert sorted(x for part in parts for x in part) == list(range(ROWS))
            orders.append(parts)
        assert orders[0] != orders[1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("plain")
    return folder / "out", run(config_of(write_files(folder, 1)), folder / "out")


@pytest.mark.parametrize(
    ("name", "mark", "line_end"),
    [
        ("log.csv", BOM, b"\r\n"),
        ("log.csv.gz", BOM, b"\r\n"),
        ("a ü 数据.csv", b"", b"\r\n"),
        ("link.csv", BOM, b"\n"),
    ],
)
def test_an_encoding_of_a_table_prepares_as_the_plain_file(
    tmp_path: Path, plain: tuple[Path, Manifest], name: str, mark: bytes, line_end: bytes
) -> None:
    """The label, in the first column, keeps its name, and the last column has no carriage return."""
    content = mark + line_end.join(line.encode() for line in ["label,x,c", *LINES, ""])
    path = tmp_path / name
    if name == "link.csv":
        path.symlink_to(tmp_path / "target")
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found = run(config_of(path), tmp_path / "out")
    assert rows_of(tmp_path / "out", found) == rows_of(*plain)


def rows_of(folder: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """What the training parts hold, but for where blocks were cut."""
    parts = manifest.splits["train"].parts
    tables = [pa.ipc.open_file(pa.memory_map(str(folder / part.file.name))).read_all() for part in parts]
    rows: list[dict[str, Any]] = pa.concat_tables(tables).drop_columns(["number"]).to_pylist()
    return rows


LISTS = [["a", "b"], [], ["b", "b", "c"], ["a"]] * 50
INTEGERS = [[1, 2], [], [2, 2, 3], [1]] * 50
COLUMNS = {
    "list<string>": pa.array(LISTS),
    "list<int64>": pa.array(INTEGERS),
    "large_list": pa.array(INTEGERS, pa.large_list(pa.int32())),
    "null lists": pa.array([bag or None for bag in LISTS]),
    "nothing but null lists": pa.nulls(200, pa.list_(pa.string())),
    "a null inside": pa.array([[*bag, None] for bag in LISTS]),
    "fixed size": pa.array([[1, 2]] * 200, pa.list_(pa.int64(), 2)),
    "dictionary": pa.array(["x", None, "y", "z"] * 50).dictionary_encode(),
    "view": pa.array(["x", None, "y", "z"] * 50, pa.string_view()),
    "decimal": pa.array([Decimal("0.25"), None, Decimal(1), Decimal(7)] * 50, pa.decimal128(9, 2)),
    "bool": pa.array([True, None, False, False] * 50),
    "null": pa.nulls(200),
    "uint64": pa.array([2**64 - 1, None, 7, 2**63] * 50, pa.uint64()),
}


@pytest.mark.parametrize("encoding", ["hash", "vocabulary"])
def test_parquet_types_prepare_as_they_are_read(tmp_path: Path, encoding: str) -> None:
    """Null lists and empty ones the same."""
    pq.write_table(pa.table({"label": [0, 1] * 100} | COLUMNS), tmp_path / "log.parquet")
    settings = {"encoding": encoding, "num_embeddings": 100}
    sparse = [
        {"name": name, "multi_valued": pa.types.is_nested(column.type), **settings} for name, column in COLUMNS.items()
    ]
    config = config_of(tmp_path / "log.parquet", {"sparse": sparse}, kind="parquet", eval_fraction=0.2)
    rows = rows_of(tmp_path / "out", run(config, tmp_path / "out"))
    assert_same_rows(config, tmp_path / "out")
    assert [row["sparse/list<string>"] for row in rows] == [row["sparse/null lists"] for row in rows]
    assert {type(row["sparse/list<string>"]) for row in rows} == {list}


def test_parquet_columns_are_matched_by_name(tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1] * 100, "c": ["x", "y"] * 100, "x": range(200)})
    pq.write_table(table, tmp_path / "0.parquet")
    pq.write_table(table.select(["x", "c", "label"]), tmp_path / "1.parquet")
    config = config_of(tmp_path / "*.parquet", kind="parquet")
    rows = rows_of(tmp_path / "out", run(config, tmp_path / "out"))
    assert rows[:200] == rows[200:]
    assert [row["dense/x"] for row in rows[:200]] == list(range(200))

"""The Parquet source: types survive, columns are matched by name, bad files are named."""

from __future__ import annotations

import decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from data.errors import DataError
from data.registry import open_source
from data.sources.source import MAX_BLOCK_ROWS


def write(path: Path, **columns: pa.Array) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def read(paths: list[str], columns: list[str]) -> list[dict[str, object]]:
    return [row for block in open_source("parquet", paths).blocks(columns) for row in block.columns.to_pylist()]


def message(paths: list[str], columns: list[str]) -> str:
    with pytest.raises(DataError) as error:
        read(paths, columns)
    return str(error.value)


COLUMNS = {
    "texts": pa.array([["a", "b"], None, [], [None, "c"]], pa.list_(pa.string())),
    "ids": pa.array([[1], None, [], [None, 2]], pa.large_list(pa.int64())),
    "word": pa.array(["x", None, "x", "y"]).dictionary_encode(),
    "price": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal(0), decimal.Decimal(7)], pa.decimal128(9, 2)),
    "flag": pa.array([True, None, False, True]),
    "big": pa.array([2**64 - 1, None, 0, 1], pa.uint64()),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
def test_values_and_types_survive(name: str, compression: str, tmp_path: Path) -> None:
    path = tmp_path / "part.brotli"
    pq.write_table(pa.table(COLUMNS), path, compression=compression)
    (block,) = open_source("parquet", [str(path)]).blocks([name])
    column = block.columns[name].combine_chunks()
    assert column.to_pylist() == COLUMNS[name].to_pylist()
    assert column.type == COLUMNS[name].type


def test_columns_are_matched_by_name_and_come_in_the_order_asked_for(tmp_path: Path) -> None:
    one = write(tmp_path / "1.parquet", a=pa.array([1]), b=pa.array(["x"]))
    two = write(tmp_path / "2.parquet", b=pa.array(["y"]), c=pa.array([0]), a=pa.array([2]))
    assert read([one, two], ["b", "a"]) == [{"b": "x", "a": 1}, {"b": "y", "a": 2}]
    (block, _) = open_source("parquet", [one, two]).blocks(["b", "a"])
    assert block.columns.column_names == ["b", "a"]


def test_a_column_whose_name_another_one_starts_with(tmp_path: Path) -> None:
    path = tmp_path / "p"
    pq.write_table(pa.table({"a.b": [1], "a": [2]}), path)
    assert read([str(path)], ["a"]) == [{"a": 2}]
    assert read([str(path)], ["a.b"]) == [{"a.b": 1}]


def test_two_types_of_a_requested_column_are_refused_before_reading(tmp_path: Path) -> None:
    one = write(tmp_path / "1.parquet", a=pa.array([1]), b=pa.array([1]))
    two = write(tmp_path / "2.parquet", a=pa.array(["x"]), b=pa.array([2]))
    text = message([one, two], ["a", "b"])
    assert all(part in text for part in (one, two, "'a'", "int64", "string"))
    assert read([one, two], ["b"]) == [{"b": 1}, {"b": 2}]


def test_storage_that_holds_the_same_values_is_the_same_type(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "1", a=pa.array(["x"]), l=pa.array([["x"]])),
        write(tmp_path / "2", a=pa.array(["x"], pa.large_string()), l=pa.array([["x"]], pa.large_list(pa.string()))),
        write(tmp_path / "3", a=pa.array(["x"]).dictionary_encode(), l=pa.array([["x"]])),
        write(tmp_path / "4", a=pa.nulls(1), l=pa.nulls(1)),
    ]
    assert [row["a"] for row in read(paths, ["a", "l"])] == ["x", "x", "x", None]


def test_rows_are_numbered_within_their_file(tmp_path: Path) -> None:
    rows = MAX_BLOCK_ROWS + 3
    one, two = (write(tmp_path / name, n=pa.array(range(1, rows + 1))) for name in "ab")
    blocks = list(open_source("parquet", [one, two]).blocks(["n"]))
    assert {block.unit for block in blocks} == {"row"}
    for block in blocks:
        assert block.columns["n"][0].as_py() == block.first_line
        assert block.columns.num_rows <= MAX_BLOCK_ROWS
    assert sum(block.columns.num_rows for block in blocks) == 2 * rows


def test_a_missing_column_names_file_and_nearest(tmp_path: Path) -> None:
    text = message([write(tmp_path / "p", click=pa.array([1]))], ["clik"])
    assert all(part in text for part in (str(tmp_path / "p"), "'clik'", "did you mean 'click'"))


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"PAR1" + b"x" * 50])
def test_what_is_no_parquet_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(content)
    with pytest.raises(DataError, match=str(tmp_path / "p.parquet")):
        open_source("parquet", [str(tmp_path / "p.parquet")]).columns()


def test_a_damaged_page_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"a": [f"{i * i:x}" for i in range(5000)]}), path, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)
    assert str(path) in message([str(path)], ["a"])


def test_no_rows_at_all_cannot_be_trained_on(tmp_path: Path) -> None:
    empty = write(tmp_path / "1", a=pa.array([], pa.int64()))
    full = write(tmp_path / "2", a=pa.array([1]))
    assert read([empty, full], ["a"]) == [{"a": 1}]
    assert "no rows" in message([empty], ["a"])
    assert list(open_source("parquet", [empty], split="eval").blocks(["a"])) == []

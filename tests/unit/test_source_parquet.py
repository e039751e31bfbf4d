"""The Parquet source: types survive, columns are matched by name, bad files are named."""

from __future__ import annotations

import decimal
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from source_cases import blocks_of, rows_of

from data.bad_rows import BadRows
from data.errors import DataError
from data.registry import open_source
from data.sources import parquet
from data.sources.source import MAX_CHUNK_ROWS, Chunk


def write(path: Path, **columns: pa.Array) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def read(paths: list[str], columns: list[str]) -> list[dict[str, object]]:
    return rows_of(open_source("parquet", paths), columns)


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
    (block,) = blocks_of(open_source("parquet", [str(path)]), [name])
    column = block.columns[name].combine_chunks()
    assert column.to_pylist() == COLUMNS[name].to_pylist()
    assert column.type == COLUMNS[name].type


def test_columns_are_matched_by_name_and_come_in_the_order_asked_for(tmp_path: Path) -> None:
    one = write(tmp_path / "1.parquet", a=pa.array([1]), b=pa.array(["x"]))
    two = write(tmp_path / "2.parquet", b=pa.array(["y"]), c=pa.array([0]), a=pa.array([2]))
    assert read([one, two], ["b", "a"]) == [{"b": "x", "a": 1}, {"b": "y", "a": 2}]
    (block, _) = blocks_of(open_source("parquet", [one, two]), ["b", "a"])
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
    rows = MAX_CHUNK_ROWS + 3
    one, two = (write(tmp_path / name, n=pa.array(range(1, rows + 1))) for name in "ab")
    blocks = list(blocks_of(open_source("parquet", [one, two]), ["n"]))
    for block in blocks:
        assert block.columns["n"].to_pylist() == list(block.numbers)
        assert block.place(0) == f"{(one, two)[block.file_index]} row {block.numbers[0]}"
    assert [sum(block.num_rows for block in blocks if block.file_index == index) for index in (0, 1)] == [rows, rows]


@pytest.mark.parametrize(
    ("group_rows", "expected"),
    [
        ([5], [(0, 1, 0, 5)]),
        ([8], [(0, 1, 0, 8)]),
        ([9], [(0, 1, 0, 6), (0, 1, 6, 3)]),
        ([17], [(0, 1, 0, 6), (0, 1, 6, 6), (0, 1, 12, 5)]),
        ([3, 0, 3, 2, 1], [(0, 4, 0, 8), (4, 5, 0, 1)]),
        ([0, 0, 3], [(2, 3, 0, 3)]),
        ([4, 9, 4], [(0, 1, 0, 4), (1, 2, 0, 6), (1, 2, 6, 3), (2, 3, 0, 4)]),
        ([], []),
    ],
)
def test_small_row_groups_are_joined_and_large_ones_cut(
    group_rows: list[int], expected: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_CHUNK_ROWS", 8)
    monkeypatch.setattr(parquet, "BLOCK_ROWS", 2)
    path = tmp_path / "p"
    values = iter(range(100))
    with pq.ParquetWriter(path, pa.schema({"n": pa.int64()})) as writer:
        for count in group_rows:
            writer.write_table(pa.table({"n": pa.array([next(values) for _ in range(count)], pa.int64())}))
    source = open_source("parquet", [str(path)], split="eval")
    chunks = list(source.chunks())
    assert [(*chunk.groups, chunk.skipped, chunk.num_rows) for chunk in chunks] == expected  # type: ignore[attr-defined]
    assert [number for chunk in chunks for number in numbers_of(chunk)] == list(range(sum(group_rows)))
    assert all(block.num_rows <= 2 for chunk in chunks for block in chunk.blocks(["n"], BadRows()))
    if chunks:
        assert sum(chunk.num_bytes for chunk in chunks) == source.num_bytes() == path.stat().st_size


def numbers_of(chunk: Chunk, columns: Sequence[str] = ("n",)) -> list[int]:
    return [int(number) for block in chunk.blocks(columns, BadRows()) for number in block.columns["n"].to_pylist()]


def test_parts_of_a_row_group_read_in_any_order_and_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_CHUNK_ROWS", 8)
    monkeypatch.setattr(parquet, "BLOCK_ROWS", 4)
    path = write(tmp_path / "p", n=pa.array(range(40)), m=pa.array(range(40)))
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in open_source("parquet", [path]).chunks()]
    expected = [list(range(first, first + 8)) for first in range(0, 40, 8)]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 1, 3, 0, 4, 2]):
        assert [numbers_of(chunks[index]) for index in order] == [expected[index] for index in order]
    next(chunks[1].blocks(["n"], BadRows()))  # left in the middle
    assert numbers_of(chunks[1]) == expected[1]
    assert numbers_of(chunks[2], ["m", "n"]) == expected[2]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(numbers_of, chunks * 5)) == expected * 5


def test_parts_read_in_order_decode_a_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_CHUNK_ROWS", 8)
    monkeypatch.setattr(parquet, "BLOCK_ROWS", 4)
    opened: list[str] = []
    whole = parquet.pq.ParquetFile

    def counting(path: str, **options: Any) -> pq.ParquetFile:
        opened.append(path)
        return whole(path, **options)

    chunks = list(open_source("parquet", [write(tmp_path / "p", n=pa.array(range(40)))]).chunks())
    monkeypatch.setattr(parquet.pq, "ParquetFile", counting)
    assert [numbers_of(chunk)[0] for chunk in chunks] == [0, 8, 16, 24, 32]
    assert len(opened) == 1


def test_a_file_that_shrank_since_it_was_opened_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "p", n=pa.array(range(40)))
    (chunk,) = open_source("parquet", [path]).chunks()
    write(tmp_path / "p", n=pa.array(range(10)))
    with pytest.raises(DataError, match="changed while it was being read"):
        numbers_of(chunk)


def test_a_fault_of_a_later_file_is_found_before_the_first_row(tmp_path: Path) -> None:
    one = write(tmp_path / "1", a=pa.array([1]), b=pa.array([1]))
    two = write(tmp_path / "2", b=pa.array([1]))
    chunk = next(iter(open_source("parquet", [one, two]).chunks()))
    with pytest.raises(DataError, match=f"{two}: column 'a' not found"):
        list(chunk.blocks(["a"], BadRows()))
    assert [block.num_rows for block in chunk.blocks(["b"], BadRows())] == [1]
    (tmp_path / "2").write_bytes(b"x")
    with pytest.raises(DataError, match="not readable as Parquet"):
        next(iter(open_source("parquet", [one, two]).chunks()))


def test_the_fingerprint_is_taken_while_chunks_are_made(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, n=pa.array(range(count))) for name, count in (("1", 40), ("2", 3))]
    expected = open_source("parquet", paths).fingerprint()
    source = open_source("parquet", paths)
    list(source.chunks())
    for path in paths:
        Path(path).unlink()
    assert source.fingerprint() == expected


def test_a_missing_column_names_file_and_nearest(tmp_path: Path) -> None:
    text = message([write(tmp_path / "p", click=pa.array([1]))], ["clik"])
    assert all(part in text for part in (str(tmp_path / "p"), "'clik'", "did you mean 'click'"))


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"PAR1" + b"x" * 50])
def test_what_is_no_parquet_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(content)
    with pytest.raises(DataError, match=str(tmp_path / "p.parquet")):
        open_source("parquet", [str(tmp_path / "p.parquet")]).columns()


def test_text_that_is_read_as_parquet_names_the_kind_for_text(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("click,a\n1,2\n")
    with pytest.raises(DataError, match=r"use data\.kind: csv \(erase-rec predict: --kind csv\)"):
        open_source("parquet", [str(tmp_path / "p.csv")]).columns()


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
    assert list(blocks_of(open_source("parquet", [empty], split="eval"), ["a"])) == []


def test_a_column_s_name_that_is_no_text_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"name": [1]}), path)
    path.write_bytes(path.read_bytes().replace(b"name", b"nam\xf4"))
    with pytest.raises(DataError, match="not readable as Parquet"):
        open_source("parquet", [str(path)]).columns()

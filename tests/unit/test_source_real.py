"""Public click logs as their owners wrote them; skipped where ERASE_REC_DATA names no folder with them."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from source_cases import blocks_of, table_of

from data.errors import DataError
from data.registry import open_source


@pytest.fixture
def real() -> Path:
    folder = os.environ.get("ERASE_REC_DATA")
    if not folder:
        pytest.skip("ERASE_REC_DATA names no folder with public click logs")
    return Path(folder)


@pytest.mark.parametrize(
    ("kind", "pattern", "rows", "columns", "label", "positives"),
    [
        ("criteo", "criteo_first8k/train.csv", 7200, 40, "label", None),
        ("criteo", "criteo_first8k/*.csv", 7609, 40, "label", None),
        ("csv", "criteo_tiny_csv/train.tiny.csv", 1999, 41, "Label", None),
        ("avazu", "avazu_first9k/train.csv", 8087, 24, "click", None),
        ("csv", "open_bandit/bts_all/all.csv.gz", 10000, 90, "click", 42),
        ("csv", "talkingdata_10k/train_sample.csv", 10000, 7, "is_attributed", 31),
        ("csv", "taobao_tiny/train_sample.csv", 100, 19, "clk", 4),
        ("csv", "aliccp_sample/ali_ccp_train_sample.csv", 100, 33, "click", 7),
        ("csv", "sparrow_movie_ctr/testSamples.csv.gz", 22440, 27, "label", None),
        ("csv", "movielens_quoted/movielens_sample.txt", 200, 10, None, None),
        ("parquet", "adult_parquet/adult.parquet.brotli", 48842, 15, None, None),
        ("parquet", "taobao_tiny/*.parquet", 300, 15, None, None),
    ],
)
def test_every_row_is_read(
    real: Path, kind: str, pattern: str, rows: int, columns: int, label: str | None, positives: int | None
) -> None:
    found = table_of(open_source(kind, [str(real / pattern)]))
    assert (found.num_rows, found.num_columns) == (rows, columns)
    if positives is not None:
        assert found[label].to_pylist().count("1") == positives


def test_criteo_cells_are_the_files_text(real: Path) -> None:
    """Also where 45 % of lines end in a TAB and where hashes look like numbers."""
    path = real / "criteo_first8k" / "train.csv"
    source = open_source("criteo", [str(path)])
    assert source.label_column == "label"
    expected = [line.split("\t") for line in path.read_text().splitlines()]
    found = table_of(source)
    for position, name in enumerate(found.column_names):
        assert found[name].to_pylist() == [fields[position] for fields in expected]


def test_the_two_layouts_of_criteo_agree(real: Path) -> None:
    """The comma file's rows that are in the TAB file too, value by value."""
    columns = [f"{kind}{i}" for kind, count in (("I", 13), ("C", 26)) for i in range(1, count + 1)]
    tabs = table_of(open_source("criteo", [str(real / "criteo_first8k" / "train.csv")]), columns)
    commas = table_of(open_source("csv", [str(real / "criteo_tiny_csv" / "train.tiny.csv")]), columns)
    known = {tuple(row.values()) for row in tabs.to_pylist()}
    assert sum(tuple(row.values()) in known for row in commas.to_pylist()) == 1806


def test_crlf_and_gzip_of_criteo_read_as_the_plain_file(real: Path, tmp_path: Path) -> None:
    path = real / "criteo_first8k" / "dev.csv"
    plain = table_of(open_source("criteo", [str(path)]))
    crlf = tmp_path / "dev crlf.csv.gz"
    crlf.write_bytes(gzip.compress(path.read_bytes().replace(b"\n", b"\r\n")))
    assert table_of(open_source("criteo", [str(crlf)])).equals(plain)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("criteo", "criteo_tiny_csv/train.tiny.csv", "comma separated"),
        ("csv", "criteo_first8k/train.csv", "TAB separated"),
        ("parquet", "porto_10k/train.csv", "kind: csv"),
        ("csv", "adult_parquet/adult.parquet.brotli", "kind: parquet"),
    ],
)
def test_the_wrong_reader_says_which_is_right(real: Path, kind: str, name: str, expected: str) -> None:
    source = open_source(kind, [str(real / name)])
    with pytest.raises(DataError, match=expected):
        next(blocks_of(source))

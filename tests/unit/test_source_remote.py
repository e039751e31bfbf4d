"""URLs stand where paths do: the same rows, the same messages; only what is missing is another thing."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from source_cases import blocks_of, table_of

from data.bad_rows import BadRows
from data.errors import DataError
from data.registry import open_source
from data.sources import paths

CONTENT = b"a,b\n" + b"1,2\n" * 50 + b"3,4\n"


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    remote = fsspec.filesystem("memory")
    yield remote
    remote.rm("/log", recursive=True)


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "a ü 数据.csv"])
def test_text_at_a_url_reads_as_the_local_file(name: str, memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    content = gzip.compress(CONTENT) if name.endswith(".gz") else CONTENT
    (tmp_path / name).write_bytes(content)
    memory.pipe(f"/log/{name}", content)
    local = open_source("csv", [str(tmp_path / name)])
    for url in (f"memory://log/{name}", f"memory:///log/{name}", f"file://{tmp_path}/{name}"):
        source = open_source("csv", [url])
        assert table_of(source).equals(table_of(local))
        assert source.fingerprint() == local.fingerprint()
        assert source.num_bytes() == len(content)
    (block,) = blocks_of(open_source("csv", [f"memory://log/{name}"]))
    assert block.place(0) == f"memory:///log/{name}:2"


def test_parquet_at_a_url_reads_as_the_local_file(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(100)}), tmp_path / "p", row_group_size=30)
    memory.pipe("/log/p", (tmp_path / "p").read_bytes())
    remote, local = (open_source("parquet", [path]) for path in ("memory://log/p", str(tmp_path / "p")))
    assert table_of(remote).equals(table_of(local))
    assert remote.fingerprint() == local.fingerprint()
    memory.pipe("/log/q", b"no parquet")
    with pytest.raises(DataError, match="memory:///log/q: not readable as Parquet"):
        open_source("parquet", ["memory://log/q"]).columns()


def test_globs_of_urls_are_sorted_and_hold_files_only(memory: fsspec.AbstractFileSystem) -> None:
    for name in ("b.csv", "a.csv", "a.txt", "deep.csv/c.csv"):
        memory.pipe(f"/log/{name}", CONTENT)
    source = open_source("csv", ["memory://log/*.csv"])
    assert [file.name for file in source.inputs()] == ["memory:///log/a.csv", "memory:///log/b.csv"]
    with pytest.raises(DataError, match=r"no file matches 'memory://log/\*\.tsv'"):
        open_source("csv", ["memory://log/*.tsv"])
    with pytest.raises(DataError, match=r"memory:///log/a\.csv' would be read twice"):
        open_source("csv", ["memory://log/a.csv", "memory://log/a.*"])


def test_a_file_url_and_a_path_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(CONTENT)
    with pytest.raises(DataError, match="read twice"):
        open_source("csv", [str(tmp_path / "a.csv"), f"file://{tmp_path}/a.csv"])
    (file,) = open_source("csv", [f"file://{tmp_path}/*.csv"]).inputs()
    assert file.name == str(tmp_path / "a.csv")


def test_missing_urls_and_folders_are_named(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/log/a.csv", CONTENT)
    with pytest.raises(DataError, match=r"file 'memory://log/b\.csv' not found"):
        open_source("csv", ["memory://log/b.csv"])
    with pytest.raises(DataError, match=r"'memory://log' is a folder: name its files, such as 'memory://log/\*'"):
        open_source("csv", ["memory://log"])


def test_a_missing_package_or_protocol_is_named() -> None:
    with pytest.raises(DataError, match=r"'gs://bucket/day_0' needs the package gcsfs: pip install gcsfs"):
        open_source("criteo", ["gs://bucket/day_0"])
    with pytest.raises(DataError, match=r"knows no protocol 'htp'; did you mean 'http'\?"):
        open_source("criteo", ["htp://host/day_0"])


def test_a_remote_file_that_changed_or_went_is_named(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/log/a.csv", CONTENT)
    source = open_source("csv", ["memory://log/a.csv"])
    (chunk,) = source.chunks()
    (before,) = source.inputs()
    memory.pipe("/log/a.csv", CONTENT[:-8])
    assert source.inputs() != [before]
    with pytest.raises(DataError, match=r"memory:///log/a\.csv: the file was changed"):
        list(pickle.loads(pickle.dumps(chunk)).blocks(["a"], BadRows()))
    memory.pipe("/log/b.csv", b"")
    memory.rm("/log/a.csv")
    with pytest.raises(DataError, match=r"memory:///log/a\.csv: cannot be read"):
        list(chunk.blocks(["a"], BadRows()))


def test_paths_become_absolute_and_urls_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert paths.absolute("day_*") == f"{tmp_path}/day_*"
    assert paths.absolute("/a/b") == "/a/b"
    assert paths.absolute("~/b") == "/home/me/b"
    for url in ("s3://bucket/day_*", "file:///a", "memory://a", "simplecache::s3://bucket/a"):
        assert paths.absolute(url) == url

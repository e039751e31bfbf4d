"""Chunks of text: wherever a file is cut, its rows, their numbers and its bad lines are the same."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_cases import blocks_of, table_of

from data.bad_rows import BadRows
from data.errors import DataError
from data.registry import open_source
from data.sources import delimited, text_file
from data.sources.source import Source

Found = tuple[list[tuple[int, str, str]], list[tuple[int, str]]]


@pytest.fixture
def sizes() -> Iterator[Any]:
    """Sets how much is read, cut and parsed at a time; sets it back."""
    patch = pytest.MonkeyPatch()

    def set_sizes(read: int, chunk: int, run: int) -> None:
        patch.setattr(text_file, "READ_BYTES", read)
        patch.setattr(text_file, "CHUNK_BYTES", chunk)
        patch.setattr(delimited, "RUN_BYTES", run)

    yield set_sizes
    patch.undo()


def found_in(source: Source) -> Found:
    """(line, a, b) of each row, (line, reason) of each bad one; each chunk is read from a copy, the last first."""
    rows, bad = [], []
    for chunk in reversed([pickle.loads(pickle.dumps(chunk)) for chunk in source.chunks()]):
        refused = BadRows("skip")
        blocks = list(chunk.blocks(["a", "b"], refused))
        assert all(block.num_rows == block.columns.num_rows > 0 for block in blocks)
        table = [(block, block.columns["a"].to_pylist(), block.columns["b"].to_pylist()) for block in blocks]
        rows[:0] = [row for block, a, b in table for row in zip(block.numbers.tolist(), a, b, strict=True)]
        bad[:0] = [(row.number, row.reason) for row in refused.rows]
    return rows, bad


PIECES = [b"x", b"ab", b",", b",", b"\n", b"\n", b"\r\n", b"\r", b'"', b'""', b'"a,b"', b"\0", b"\xff", "ü".encode()]
SIZES = st.tuples(st.integers(1, 12), st.integers(1, 30), st.integers(1, 20))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(PIECES), max_size=40), SIZES, st.booleans(), st.sampled_from(['"', "none"]))
def test_where_a_file_is_cut_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[bytes],
    cuts: tuple[int, int, int],
    packed: bool,
    quote: str,
) -> None:
    file = tmp_path_factory.getbasetemp() / "cut.csv"
    content = b"".join(pieces)
    file.write_bytes(content)
    params = {"columns": ["a", "b"], "quote": quote}
    whole = found_in(open_source("csv", [str(file)], params, split="eval"))
    lines = content.rstrip(b"\r\n").split(b"\n") if content.rstrip(b"\r\n") else []
    rows, bad = whole
    assert sorted([row[0] for row in rows] + [row[0] for row in bad]) == list(range(1, len(lines) + 1))
    for number, a, b in rows:
        line = lines[number - 1].removesuffix(b"\r").decode(errors="replace")
        if quote == "none" or '"' not in line:
            assert line.split(",") == [a, b]
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        for module, name, size in zip(
            (text_file, text_file, delimited), ("READ_BYTES", "CHUNK_BYTES", "RUN_BYTES"), cuts, strict=True
        ):
            context.setattr(module, name, size)
        if packed:
            file = file.with_suffix(".csv.gz")
            file.write_bytes(gzip.compress(content))
        assert found_in(open_source("csv", [str(file)], params, split="eval")) == whole


@pytest.mark.parametrize(("read", "chunk", "run"), [(7, 20, 9), (1, 1, 1), (100, 10, 1000), (50, 200, 30)])
def test_rows_are_numbered_by_line_through_chunks_and_files(
    read: int, chunk: int, run: int, tmp_path: Path, sizes: Any
) -> None:
    sizes(read, chunk, run)
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for path in paths:
        path.write_text("n\n" + "".join(f"{row}\n" for row in range(2, 100)))
    source = open_source("csv", [str(path) for path in paths])
    assert len(list(source.chunks())) > 2
    blocks = list(blocks_of(source, ["n"]))
    for block in blocks:
        assert block.columns["n"].to_pylist() == [str(line) for line in block.numbers]
        assert (block.file, block.unit) == (str(paths[block.file_index]), "line")
        assert block.place(0) == f"{paths[block.file_index]}:{block.numbers[0]}"
        assert block.numbers[0] == block.row_numbers[0] + 2
    assert [number for block in blocks for number in block.row_numbers] == list(range(98)) * 2


def test_one_file_or_five_have_the_same_rows(tmp_path: Path, sizes: Any) -> None:
    lines = [f"{row},{row * row}\n" for row in range(1000)]
    (tmp_path / "all.csv").write_text("a,b\n" + "".join(lines))
    for part in range(5):
        (tmp_path / f"part-{part}.csv").write_text("a,b\n" + "".join(lines[part * 200 : part * 200 + 200]))
    sizes(100, 500, 300)
    whole = table_of(open_source("csv", [str(tmp_path / "all.csv")])).combine_chunks()
    assert whole["a"].to_pylist() == [str(row) for row in range(1000)]
    assert table_of(open_source("csv", [str(tmp_path / "part-*.csv")])).combine_chunks().equals(whole)


def test_chunks_are_about_the_size_asked_for_and_cover_the_file(tmp_path: Path, sizes: Any) -> None:
    file = tmp_path / "a.csv"
    file.write_text("\ufeffa,b\n" + "1,2\n" * 1000 + "\n\n\n")
    sizes(16, 100, 50)
    source = open_source("csv", [str(file)])
    chunks = list(source.chunks())
    lengths = [chunk.stretch.length for chunk in chunks]  # type: ignore[attr-defined]
    assert all(100 <= length < 100 + 16 + 4 for length in lengths[:-1])
    assert sum(lengths) == 4000
    assert sum(chunk.num_bytes for chunk in chunks) == source.num_bytes() == file.stat().st_size
    assert [found.num_bytes for found in source.inputs()] == [file.stat().st_size]


def test_short_lines_end_a_chunk_by_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "MAX_CHUNK_ROWS", 50)
    monkeypatch.setattr(text_file, "READ_BYTES", 20)
    (tmp_path / "a.csv").write_text("n\n" + "1\n" * 1000)
    chunks = list(open_source("csv", [str(tmp_path / "a.csv")]).chunks())
    rows = [sum(block.num_rows for block in chunk.blocks(["n"], BadRows())) for chunk in chunks]
    assert sum(rows) == 1000
    assert all(50 <= count <= 60 for count in rows[:-1])


def test_plain_chunks_are_small_to_pickle_and_packed_ones_carry_their_bytes(tmp_path: Path, sizes: Any) -> None:
    content = b"a,b\n" + b"1,2\n" * 1000
    (tmp_path / "a.csv").write_bytes(content)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(content))
    sizes(400, 2000, 500)
    plain = list(open_source("csv", [str(tmp_path / "a.csv")]).chunks())
    packed_source = open_source("csv", [str(tmp_path / "a.csv.gz")])
    packed = list(packed_source.chunks())
    assert all(chunk.rereadable and len(pickle.dumps(chunk)) < 1500 for chunk in plain)
    assert not any(chunk.rereadable for chunk in packed)
    (tmp_path / "a.csv.gz").unlink()
    assert sum(block.num_rows for chunk in packed for block in chunk.blocks(["a"], BadRows())) == 1000
    assert sum(chunk.num_bytes for chunk in packed) == len(gzip.compress(content))


def test_a_plain_chunk_of_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a\n1\n2\n")
    (chunk,) = open_source("csv", [str(file)]).chunks()
    file.write_text("a\n1\n")
    with pytest.raises(DataError, match="changed while it was being read"):
        list(chunk.blocks(["a"], BadRows()))
    file.unlink()
    with pytest.raises(DataError, match=f"{file}: cannot be read"):
        list(chunk.blocks(["a"], BadRows()))


@pytest.mark.parametrize("packed", [False, True])
def test_the_fingerprint_is_taken_while_chunks_are_made(packed: bool, tmp_path: Path, sizes: Any) -> None:
    sizes(30, 100, 50)
    total = hashlib.sha256()
    paths = []
    for name in ("a", "b"):
        content = f"x,{name}\n".encode() + b"1,2\n" * 100
        paths.append(tmp_path / (f"{name}.gz" if packed else name))
        paths[-1].write_bytes(gzip.compress(content) + b"\0" * 600 if packed else content + b"\n\n")
        content = paths[-1].read_bytes()
        total.update(f"{len(content)} {hashlib.sha256(content).hexdigest()}\n".encode())
    source = open_source("csv", [str(path) for path in paths])
    list(source.chunks())
    assert open_source("csv", [str(path) for path in paths]).fingerprint() == total.hexdigest()
    for path in paths:
        path.unlink()
    assert source.fingerprint() == total.hexdigest()


def test_versions_tell_files_that_were_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a\n1\n")
    source = open_source("csv", [str(file)])
    (before,) = source.inputs()
    assert [before] == source.inputs()
    file.write_text("a\n2\n")
    assert source.inputs() != [before]


def test_a_header_of_a_later_file_is_read_before_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "2.csv").write_text("b,c,c\n1,2,3\n")
    source = open_source("csv", [str(tmp_path / "*.csv")])
    chunk = next(iter(source.chunks()))
    with pytest.raises(DataError, match=r"2\.csv: column 'a' not found"):
        list(chunk.blocks(["a"], BadRows()))
    assert [block.num_rows for block in chunk.blocks(["b"], BadRows())] == [1]
    with pytest.raises(DataError, match=r"1\.csv: column 'c' not found"):
        list(chunk.blocks(["c"], BadRows()))
    (tmp_path / "2.csv").write_text("")
    with pytest.raises(DataError, match=r"2\.csv: the file is empty"):
        next(iter(source.chunks()))


def test_blocks_keep_the_rows_selected(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n2\n3\n")
    (block,) = blocks_of(open_source("csv", [str(tmp_path / "a.csv")]))
    kept = block.select(block.row_numbers != 1)
    assert kept.columns["a"].to_pylist() == ["1", "3"]
    assert (kept.numbers.tolist(), kept.place(1)) == ([2, 4], f"{tmp_path}/a.csv:4")

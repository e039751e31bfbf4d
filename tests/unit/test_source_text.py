"""Text sources: what is read is what the file says, and a bad line is named with its cause."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
from source_cases import blocks_of

from data.bad_rows import BadRows
from data.errors import DataError
from data.registry import open_source
from data.sources import delimited, text_file

HEX = [f"{value:08x}" for value in range(26)]


def criteo_line(label: str = "1", first: str = "5") -> str:
    return "\t".join([label, first, *map(str, range(12)), *HEX])


def read(
    kind: str, paths: Path | list[str], columns: list[str], bad: BadRows | None = None, **options: Any
) -> dict[str, list[str]]:
    source = open_source(kind, [str(paths)] if isinstance(paths, Path) else paths, **options)
    rows: dict[str, list[str]] = {name: [] for name in columns}
    for block in blocks_of(source, columns, bad):
        assert block.columns.column_names == columns
        for name in columns:
            rows[name] += block.columns[name].to_pylist()
    return rows


def message(kind: str, path: Path | str, columns: list[str] | None = None, **options: Any) -> str:
    def read_all() -> None:
        for _ in blocks_of(open_source(kind, [str(path)], **options), columns):
            pass

    with pytest.raises(DataError) as error:
        read_all()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few bytes are a chunk and a run, so that lines straddle what is read, cut and parsed at a time."""
    set_sizes(monkeypatch, read=7, chunk=20, run=9)


def set_sizes(monkeypatch: pytest.MonkeyPatch, *, read: int, chunk: int, run: int) -> None:
    monkeypatch.setattr(text_file, "READ_BYTES", read)
    monkeypatch.setattr(text_file, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(delimited, "RUN_BYTES", run)


def test_texts_that_look_like_numbers_stay_text(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("id,hash\n9999999999999999999,3e814130\n0123,82e27996\n,NA\n")
    assert read("csv", file, ["hash", "id"]) == {
        "hash": ["3e814130", "82e27996", "NA"],
        "id": ["9999999999999999999", "0123", ""],
    }


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("tail", [b"", b"E", b"EEE"])
def test_encodings_of_one_table_read_the_same(
    tmp_path: Path, compressed: bool, bom: bytes, line_end: bytes, tail: bytes, small_chunks: None
) -> None:
    folder = tmp_path / "a ü 数据"
    folder.mkdir()
    content = bom + line_end.join([b"click,name", b"1,abc", b'0,"x, ""y"""', b"1,"]) + tail.replace(b"E", line_end)
    file = folder / ("log.csv.gz" if compressed else "log.csv")
    file.write_bytes(gzip.compress(content) if compressed else content)
    assert read("csv", file, ["click", "name"]) == {"click": ["1", "0", "1"], "name": ["abc", 'x, "y"', ""]}


def test_criteo_with_crlf_and_bom_keeps_carriage_returns_out(tmp_path: Path) -> None:
    file = tmp_path / "day.txt"
    file.write_bytes(b"\xef\xbb\xbf" + (criteo_line() + "\r\n" + criteo_line("0") + "\r\n").encode())
    assert read("criteo", file, ["label", "C26"]) == {"label": ["1", "0"], "C26": [HEX[25]] * 2}


def test_a_column_that_is_empty_but_for_its_last_row_is_text_throughout(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b\n" + "1,\n" * 19_999 + "1,x\n")
    assert read("csv", file, ["b"]) == {"b": [""] * 19_999 + ["x"]}


def test_files_are_matched_by_column_name_and_globs_are_sorted(tmp_path: Path) -> None:
    (tmp_path / "part-2.csv").write_text("b,a\n4,3\n")
    (tmp_path / "part-1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "link.csv").symlink_to(tmp_path / "part-1.csv")
    assert read("csv", [str(tmp_path / "part-*.csv")], ["a", "b"]) == {"a": ["1", "3"], "b": ["2", "4"]}
    assert read("csv", tmp_path / "link.csv", ["a"]) == {"a": ["1"]}


def test_a_name_with_glob_characters_is_first_of_all_a_name(tmp_path: Path) -> None:
    (tmp_path / "day[1].csv").write_text("a\n7\n")
    assert read("csv", tmp_path / "day[1].csv", ["a"]) == {"a": ["7"]}


@pytest.mark.parametrize(
    ("params", "content"),
    [
        ({"delimiter": "tab"}, "a\tb\n1\tx,y\n"),
        ({"delimiter": "\\t"}, "a\tb\n1\tx,y\n"),
        ({"delimiter": "|"}, 'a|b\n1|"x,y"\n'),
        ({"columns": ["a", "b"]}, '1,"x,y"\n'),
        ({"quote": "'"}, "a,b\n1,'x,y'\n"),
        ({"quote": "none", "delimiter": ";"}, "a;b\n1;x,y\n"),
    ],
)
def test_csv_params(tmp_path: Path, params: dict[str, Any], content: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(content)
    assert read("csv", file, ["a", "b"], params=params) == {"a": ["1"], "b": ["x,y"]}


def test_quotes_are_ordinary_characters_without_a_quote(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('a,b\n5" pipe,"x\n')
    assert read("csv", file, ["a", "b"], params={"quote": "none"}) == {"a": ['5" pipe'], "b": ['"x']}


@pytest.mark.parametrize("params", [{"delimiter": "ab"}, {"delimiter": ""}, {"quote": "ü"}, {"header": "false"}])
def test_impossible_csv_params_are_refused(params: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    with pytest.raises(ValueError, match=next(iter(params))):
        open_source("csv", [str(tmp_path / "a.csv")], params)


def test_empty_and_odd_column_names_are_names(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(",101,a b,user-item_affinity_0\n1,2,3,4\n")
    names = ["", "101", "a b", "user-item_affinity_0"]
    assert open_source("csv", [str(file)]).columns() == names
    assert read("csv", file, names) == dict(zip(names, [["1"], ["2"], ["3"], ["4"]], strict=True))


def test_a_requested_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b,a\n1,2,3\n")
    assert read("csv", file, ["b"]) == {"b": ["2"]}
    assert "2 columns are called 'a'" in message("csv", file, ["a"])


BAD_CRITEO = {
    "comma separated": (
        "Id,Label," + ",".join(HEX) + "\n",
        ["line 1", "1 field,", "40 TAB", "27 x comma", "kind: csv"],
    ),
    "header": (
        "\t".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]) + "\n",
        ["line 1", "column label", "'label'", "header"],
    ),
    "blank line": (f"{criteo_line()}\n\n{criteo_line()}\n", ["line 2", "blank"]),
    "blank CRLF line": (f"{criteo_line()}\r\n\r\n{criteo_line()}\r\n", ["line 2", "blank"]),
    "blank first line": (f"\n{criteo_line()}\n", ["line 1", "blank"]),
    "two blank lines": (f"{criteo_line()}\n\n\n{criteo_line()}\n", ["line 2", "blank"]),
    "41 fields": (f"{criteo_line()}\n{criteo_line()}\tx\n{criteo_line()}\n", ["line 2", "41 fields", "expected 40"]),
    "41 fields in line 1": (f"{criteo_line()}\tx\n", ["line 1", "41 fields", "expected 40"]),
    "cut off": (f"{criteo_line()}\n{criteo_line()[:90]}", ["line 2", "expected 40", "cut off"]),
    "too short inside": (
        f"{criteo_line()}\n1\t2\n{criteo_line()}\n",
        ["line 2", "2 fields", "expected 40", "incomplete"],
    ),
    "no label": (f"{criteo_line()[2:]}\n", ["line 1", "39 fields", "has_label: false"]),
    "empty": ("", ["empty"]),
    "only blank lines": ("\n\n", ["empty"]),
}


@pytest.mark.parametrize("case", BAD_CRITEO)
def test_a_bad_criteo_file_is_one_message_with_line_and_cause(case: str, tmp_path: Path) -> None:
    content, expected = BAD_CRITEO[case]
    file = tmp_path / "day_0"
    file.write_bytes(content.encode())
    text = message("criteo", file)
    assert all(part in text for part in [str(file), *expected]), text


def test_criteo_without_label_has_the_39_features(tmp_path: Path) -> None:
    file = tmp_path / "test.txt"
    file.write_text(criteo_line()[2:] + "\n")
    source = open_source("criteo", [str(file)], {"has_label": "false"})
    assert (source.label_column, len(source.columns())) == (None, 39)
    assert next(blocks_of(source, ["I1"])).columns["I1"].to_pylist() == ["5"]


BAD_CSV = {
    "TAB separated": ("1\t2\t3\n4\t5\t6\n", None, ["line 1", "1 column", "2 x TAB", "delimiter"]),
    "semicolons, one comma": ("a;b;c,d\n1;2;3,4\n", ["a"], ["'a' not found", "'a;b;c'", "semicolon"]),
    "no header": ("0,1,68fd\n1,2,3\n", ["click"], ["'click' not found", "data.params.columns"]),
    "misspelt": ("clicks,b\n1,2\n", ["click"], ["'click' not found", "'clicks'", "did you mean"]),
    "header only": ("a,b\n", None, ["header and no rows"]),
    "header only, no line end": ("a,b", None, ["header and no rows"]),
    "empty": ("", None, ["empty", "header"]),
    "blank line after the header": ("a,b\n\n1,2\n", None, ["line 2", "blank"]),
    "too many fields": ("a,b\n1,2\n1,2,3\n1\n", None, ["line 3", "3 fields", "expected 2"]),
    "a quote never closed": ('a,b\n1,2\n"x,y\n5,6\n', None, ["line 3", "quote", "quote: none"]),
    "a quote that swallows rows": ('a,b\n1,2\n3,"x\n5,6\n7,y"\n8,9\n', None, ["line 3", "quote"]),
    "a quote over a chunk": ('a,b\n1,"x\n' + "1,2\n" * 40000, None, ["line 2", "quote"]),
    "bare carriage returns": ("a,b\n1,2\r3,4\n", None, ["line 2", "carriage return"]),
    "Macintosh line ends": ("a,b\r1,2\r3,4\r", None, ["line 1", "carriage return"]),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_a_bad_csv_file_is_one_message_with_line_and_cause(case: str, tmp_path: Path) -> None:
    content, columns, expected = BAD_CSV[case]
    file = tmp_path / "log.csv"
    file.write_bytes(content.encode())
    text = message("csv", file, columns)
    assert all(part in text for part in [str(file), *expected]), text


def test_bad_lines_are_numbered_through_chunks(tmp_path: Path, small_chunks: None) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b\n" + "1,2\n" * 50 + "1,2,3\n" + "1,2\n" * 50)
    assert "line 52: found 3 fields, expected 2" in message("csv", file)
    file.write_text("a,b\n" + "1,2\n" * 50 + "\n" + "1,2\n" * 50)
    assert "line 52: the line is blank" in message("csv", file)


def test_invalid_utf8_is_named_by_line_and_field_where_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'a,b\n1,x\n"2,2",caf\xe9\n')
    assert "line 3, field 2: byte 0xe9" in message("csv", file)
    assert read("csv", file, ["a"]) == {"a": ["1", "2,2"]}
    file.write_bytes(b"a,caf\xe9\n1,x\n")
    assert "line 1: the header is not UTF-8" in message("csv", file)


def test_a_truncated_or_damaged_gzip_file_says_so(tmp_path: Path) -> None:
    file = tmp_path / "day.gz"
    whole = gzip.compress("".join(f"{criteo_line()}{row}\n" for row in range(500)).encode())
    file.write_bytes(whole[:-200])
    assert "ends too early" in message("criteo", file)
    file.write_bytes(whole[:-8] + b"\0\0\0\0" + whole[-4:])
    assert "is damaged" in message("criteo", file)


OTHER_FORMATS = {
    "a.csv.gz": (b"a,b\n1,2\n", "not gzip but the name ends in .gz"),
    "a.csv": (gzip.compress(b"a,b\n1,2\n"), "gzip but the name does not end in .gz"),
    "b.csv": (b"PAR1....", "kind: parquet (erase-rec predict: --kind parquet)"),
    "c.csv": (b"PK\x03\x04....", "zip archive"),
    "d.csv": ("a,b\n1,2\n".encode("utf-16"), "UTF-16"),
    "e.csv": (b"\x28\xb5\x2f\xfd....", "zstd"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_another_format_is_recognized(name: str, tmp_path: Path) -> None:
    content, expected = OTHER_FORMATS[name]
    (tmp_path / name).write_bytes(content)
    text = message("csv", tmp_path / name)
    assert str(tmp_path / name) in text
    assert expected in text


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: None) -> None:
    monkeypatch.setattr(text_file, "MAX_LINE_BYTES", 100)
    (tmp_path / "a.csv").write_bytes(b"a,b\n" + b"x" * 300)
    assert "line 2: no line end within" in message("csv", tmp_path / "a.csv")


def test_missing_files_are_named_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a\n1\n")
    assert "did you mean 'train.csv'?" in message("csv", tmp_path / "trian.csv")
    assert f"no file matches '{tmp_path}/*.tsv'" in message("csv", tmp_path / "*.tsv")
    assert f"there is no folder '{tmp_path}/no'" in message("csv", tmp_path / "no" / "*" / "a.csv")
    assert "is a folder" in message("csv", tmp_path)
    (tmp_path / "none").mkdir()
    assert "is empty" in message("csv", tmp_path / "none" / "a.csv")


def test_one_file_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    (tmp_path / "b.csv").symlink_to(tmp_path / "a.csv")
    with pytest.raises(DataError, match="read twice"):
        open_source("csv", [str(tmp_path / "*.csv")])


def test_files_to_evaluate_may_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "day").write_text("")
    assert read("csv", tmp_path / "a.csv", ["a"], split="eval") == {"a": []}
    assert read("criteo", tmp_path / "day", ["I1"], split="eval") == {"I1": []}


def test_the_fingerprint_is_the_contents(tmp_path: Path) -> None:
    for name, content in {"a": "x\n1\n", "b": "x\n1\n", "c": "x\n2\n"}.items():
        (tmp_path / name).write_text(content)
    prints = {name: open_source("csv", [str(tmp_path / name)]).fingerprint() for name in "abc"}
    assert prints["a"] == prints["b"] != prints["c"]
    assert open_source("csv", [str(tmp_path / "a"), str(tmp_path / "c")]).fingerprint() not in prints.values()


def test_unknown_kinds_and_files_in_the_wrong_place_are_refused() -> None:
    with pytest.raises(DataError, match="did you mean 'criteo'"):
        open_source("critoe", ["x"])
    with pytest.raises(DataError, match=r"data\.eval: names no file"):
        open_source("csv", [], split="eval")
    with pytest.raises(DataError, match="reads no files; remove x"):
        open_source("synthetic", ["x"])


def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"a,b\n" + b"0,0\n" * 2_000_000
    (tmp_path / "bomb.csv.gz").write_bytes(gzip.compress(content))
    (tmp_path / "plain.csv").write_bytes(content[:400])
    monkeypatch.setattr(text_file, "FREE_BYTES", 1 << 20)
    found = message("csv", tmp_path / "bomb.csv.gz")
    assert re.search(r"bomb\.csv\.gz: the first [\d,]+ bytes unpack to [\d,]+, more than 200 times as many", found)
    assert "unpack the file yourself" in found
    monkeypatch.setattr(text_file, "FREE_BYTES", 1)
    assert len(read("csv", tmp_path / "plain.csv", ["a"])["a"]) == 99


@pytest.mark.parametrize("quoted", ["", '"q"'])
def test_a_byte_order_mark_inside_a_file_is_a_character(tmp_path: Path, small_chunks: None, quoted: str) -> None:
    """Arrow takes it away from the start of each run of lines that it is given."""
    mark = "\ufeff"
    lines = [f"{mark}{row},{mark}{quoted or 'é'}" for row in range(9)]
    file = tmp_path / "marks.csv"
    file.write_text("\n".join(["a,b", *lines]) + "\n", encoding="utf-8")
    bad = BadRows("skip")
    found = read("csv", file, ["a", "b"], bad)
    assert found["a"] == [f"{mark}{row}" for row in range(9)]
    assert not bad.rows
    file.write_text(f"a\n{mark}\nx\n", encoding="utf-8")
    assert read("csv", file, ["a"])["a"] == [mark, "x"]

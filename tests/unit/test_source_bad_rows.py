"""Lines that are no rows: each costs itself and is named, or ends the reading, as the policy says."""

from __future__ import annotations

from pathlib import Path

import pytest
from source_cases import blocks_of

from data.bad_rows import BadRows
from data.errors import DataError
from data.registry import open_source

GOOD = [b"1,x", b'2,"a, ""b"""', b"3,", b",", b"4,\xc3\xbc"]
BAD = {
    "too many fields": (b"1,2,3", "", "found 3 fields, expected 2"),
    "too few fields": (b"1", "", "found 1 field, expected 2"),
    "too many with quotes": (b'"1",2,"3,4"', "", "found 3 fields, expected 2"),
    "blank": (b"", "", "the line is blank"),
    "blank with CR": (b"\r", "", "the line is blank"),
    "not UTF-8": (b"1,caf\xe9", "b", "byte 0xe9 is not UTF-8"),
    "not UTF-8 in quotes": (b'"\xff,",2', "a", "byte 0xff is not UTF-8"),
    "NUL": (b"1,\0", "", "NUL byte"),
    "an open quote": (b'1,"x', "", "a quote is opened and not closed"),
    "an open quote first": (b'"1,x', "", "a quote is opened and not closed"),
    "stray CR": (b"1\r,2", "", "a carriage return stands without a line feed"),
    "two lines joined by CR": (b"1,2\r3,4", "", "a carriage return stands without a line feed"),
}
SEPARATORS = {"LF": b"\n", "CRLF": b"\r\n"}


def write(path: Path, lines: list[bytes], separator: bytes) -> Path:
    path.write_bytes(b"a,b" + separator + b"".join(line + separator for line in lines))
    return path


PLACES = [
    (case, at, separator)
    for case in BAD
    for at in range(len(GOOD) + 1)
    for separator in SEPARATORS
    # a blank line at the file's end is harmless, and CR before CRLF is a stray CR
    if not case.startswith("blank") or (at < len(GOOD) and (case == "blank" or separator == "LF"))
]


@pytest.mark.parametrize(("case", "at", "separator"), PLACES)
def test_a_bad_line_costs_only_itself(case: str, at: int, separator: str, tmp_path: Path) -> None:
    line, column, reason = BAD[case]
    lines = [*GOOD[:at], line, *GOOD[at:]]
    file = write(tmp_path / "log.csv", lines, SEPARATORS[separator])
    source = open_source("csv", [str(file)])
    with pytest.raises(DataError) as error:
        list(blocks_of(source))
    bad = BadRows("quarantine")
    (block,) = blocks_of(source, ["a", "b"], bad)
    assert block.columns.to_pydict() == {"a": ["1", "2", "3", "", "4"], "b": ["x", 'a, "b"', "", "", "ü"]}
    assert block.row_numbers.tolist() == [index for index in range(len(lines)) if index != at]
    (row,) = bad.rows
    assert (row.file, row.unit, row.number, row.column) == (str(file), "line", at + 2, column)
    assert reason in row.reason
    assert str(error.value).startswith(f"{file}, line {at + 2}")
    assert str(error.value).endswith(row.reason)
    assert "\n" not in row.reason


@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_every_bad_line_is_told_in_order_with_what_it_holds(policy: str, tmp_path: Path) -> None:
    lines = [line for case in BAD for line in (BAD[case][0], *GOOD)]
    bad = BadRows(policy)  # type: ignore[arg-type]
    source = open_source("csv", [str(write(tmp_path / "log.csv", lines, b"\n"))])
    blocks = list(blocks_of(source, ["a", "b"], bad))
    assert sum(block.num_rows for block in blocks) == len(GOOD) * len(BAD)
    assert [row.number for row in bad.rows] == [2 + 6 * index for index in range(len(BAD))]
    for row, (line, column, reason) in zip(bad.rows, BAD.values(), strict=True):
        assert reason in row.reason
        if not column:
            assert row.value == line.removesuffix(b"\r").decode(errors="replace")


def test_the_first_bad_line_is_the_one_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", [b"1,2", b'"1,2', b"1,2", b"1", b""], b"\n")
    with pytest.raises(DataError, match="line 3: a quote"):
        list(blocks_of(open_source("csv", [str(file)])))


def test_a_file_of_bad_lines_alone_has_no_block(tmp_path: Path) -> None:
    bad = BadRows("skip")
    source = open_source("csv", [str(write(tmp_path / "a.csv", [b"1", b"2"], b"\n"))])
    assert list(blocks_of(source, ["a", "b"], bad)) == []
    assert len(bad.rows) == 2


def test_columns_that_nobody_asks_for_may_be_no_utf8(tmp_path: Path) -> None:
    source = open_source("csv", [str(write(tmp_path / "a.csv", [b"1,\xff", b"1", b"2,x"], b"\n"))])
    bad = BadRows("skip")
    (block,) = blocks_of(source, ["a"], bad)
    assert block.columns["a"].to_pylist() == ["1", "2"]
    assert [row.number for row in bad.rows] == [3]


def test_an_open_quote_in_the_last_line_is_found(tmp_path: Path) -> None:
    """Arrow takes the file's end for the closing quote."""
    for name, columns, content in (("one.csv", ["a"], b'a\n1\n"2'), ("two.csv", ["a", "b"], b'a,b\n1,2\n3,"4\n')):
        (tmp_path / name).write_bytes(content)
        bad = BadRows("skip")
        (block,) = blocks_of(open_source("csv", [str(tmp_path / name)]), columns, bad)
        assert block.columns["a"].to_pylist() == ["1"]
        assert [(row.number, "quote" in row.reason) for row in bad.rows] == [(3, True)]


def test_one_column_may_be_empty_but_no_blank_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a\n1\n""\n\n2\n')
    bad = BadRows("skip")
    (block,) = blocks_of(open_source("csv", [str(tmp_path / "a.csv")]), ["a"], bad)
    assert block.columns["a"].to_pylist() == ["1", "", "2"]
    assert [(row.number, row.column) for row in bad.rows] == [(4, "")]


def test_a_line_break_in_quotes_costs_the_line_that_it_opens_on(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,b\n1,"x\ny"\n2,z\n')
    bad = BadRows("skip")
    (block,) = blocks_of(open_source("csv", [str(tmp_path / "a.csv")]), ["a", "b"], bad)
    assert block.columns["a"].to_pylist() == ["2"]
    assert [row.number for row in bad.rows] == [2, 3]


CRITEO = "\t".join(["1", *"0123456789abc", *(f"{value:08x}" for value in range(26))]).replace("a\tb\tc", "\t\t3")


def test_a_damaged_first_line_of_criteo_is_a_bad_row_among_others_that_fit(tmp_path: Path) -> None:
    file = tmp_path / "day_0"
    file.write_text(f"{CRITEO}\tx\n" + f"{CRITEO}\n" * 3 + f"{CRITEO[:30]}\n")
    source = open_source("criteo", [str(file)])
    bad = BadRows("skip")
    (block,) = blocks_of(source, ["label"], bad)
    assert block.numbers.tolist() == [2, 3, 4]
    assert [(row.number, row.value) for row in bad.rows] == [(1, CRITEO[:80] + "..."), (5, CRITEO[:30])]
    with pytest.raises(DataError, match="line 1: found 41 fields"):
        list(blocks_of(source, ["label"]))


@pytest.mark.parametrize("content", ["label\t" + "\t".join("I1" for _ in range(39)), "1,2,3\n4,5,6", "a\n" * 20])
def test_a_criteo_file_of_another_layout_is_refused_before_any_row(content: str, tmp_path: Path) -> None:
    (tmp_path / "good").write_text(CRITEO + "\n")
    (tmp_path / "other").write_text(f"{content}\n")
    with pytest.raises(DataError, match=f"{tmp_path}/other, line 1"):
        next(iter(open_source("criteo", [str(tmp_path / "good"), str(tmp_path / "other")]).chunks()))


def test_a_bad_number_in_the_first_line_of_criteo_is_no_header(tmp_path: Path) -> None:
    (tmp_path / "day").write_text(CRITEO.replace("\t0\t", "\tx\t", 1) + "\n")
    (block,) = blocks_of(open_source("criteo", [str(tmp_path / "day")]), ["I1"])
    assert block.columns["I1"].to_pylist() == ["x"]

"""Text files as runs of whole lines: compression, byte order mark, line ends, blank lines.

One row is one line here, so that every message can name its line; a quoted field may hold the delimiter but no line
break.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from data.errors import DataError

CHUNK_BYTES = 8 << 20
MAX_LINE_BYTES = 64 << 20

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_NOT_TEXT = {
    b"PAR1": "is a Parquet file: use data.kind: parquet",
    b"PK\x03\x04": "is a zip archive: unpack it first",
    b"BZh": "is bzip2-compressed: unpack it, or compress with gzip",
    b"\x28\xb5\x2f\xfd": "is zstd-compressed: unpack it, or compress with gzip",
    b"\xfd7zXZ": "is xz-compressed: unpack it, or compress with gzip",
    b"\xff\xfe": "is UTF-16 text: save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text: save it as UTF-8",
}


@dataclass(frozen=True)
class Lines:
    """Whole lines of a text file.

    Attributes:
        body: the lines; neither it nor any of its lines is empty, and the last one's line end is cut off.
        first_line: 1-based number of the first line.
        cut_off: the file ends in the last line, without a line end.
    """

    body: bytes
    first_line: int
    cut_off: bool

    def count(self) -> int:
        """Number of lines."""
        return self.body.count(b"\n") + 1

    def line(self, index: int) -> bytes:
        """Line ``index`` (from 0), without its line end. Walks the lines: for messages."""
        return self.body.split(b"\n", index + 1)[index].rstrip(b"\r")


def first_line(path: Path) -> bytes:
    """The first line without byte order mark and line end; empty for an empty file.

    Raises:
        DataError: the file is no plain or gzip text, or starts with a blank line.
    """
    with _opened(path) as stream:
        return _read_first_line(stream, path).rstrip(b"\r\n")


def lines(path: Path, *, skip_first: bool = False) -> Iterator[Lines]:
    """The file in runs of about ``CHUNK_BYTES``, all lines but blank ones at the end.

    Args:
        path: plain or gzip text, as its name says.
        skip_first: leave out the first line (a header); numbering counts it.

    Raises:
        DataError: not readable as text, cut-off compression, a blank line, a line over ``MAX_LINE_BYTES``.
    """
    with _opened(path) as stream:
        first = _read_first_line(stream, path)
        carry, number = (b"", 2) if skip_first else (first, 1)
        while data := _read(stream, path, number + carry.count(b"\n")):
            buffer = carry + data
            body, carry = _cut(buffer)
            if len(carry) > MAX_LINE_BYTES:
                raise DataError(f"{path}, line {number}: no line end within {MAX_LINE_BYTES >> 20} MiB; is it text?")
            if body:
                run = Lines(body, number, cut_off=False)
                _refuse_blank_line(run, path)
                yield run
                number += run.count()
        body = carry.rstrip(b"\r\n")
        if body:
            run = Lines(body, number, cut_off=len(body) == len(carry))
            _refuse_blank_line(run, path)
            yield run


def _cut(buffer: bytes) -> tuple[bytes, bytes]:
    """Splits behind the last complete line that is not blank: blank lines are harmless where no line follows."""
    complete = buffer[: buffer.rfind(b"\n") + 1]
    body = complete.rstrip(b"\r\n")
    if not body:
        return b"", buffer
    return body, buffer[buffer.index(b"\n", len(body)) + 1 :]


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        magic = raw.read(6)
    for prefix, what in _NOT_TEXT.items():
        if magic.startswith(prefix):
            raise DataError(f"{path}: {what}")
    compressed = magic.startswith(_GZIP)
    named = path.name.lower().endswith(".gz")
    if magic and compressed != named:
        found, name = ("gzip", "does not end in .gz") if compressed else ("not gzip", "ends in .gz")
        raise DataError(f"{path}: the content is {found} but the name {name}; rename the file")
    if compressed:
        with gzip.open(path, "rb") as unpacked:
            yield cast(IO[bytes], unpacked)
    else:
        with path.open("rb") as plain:
            yield plain


def _read(stream: IO[bytes], path: Path, line: int) -> bytes:
    try:
        return stream.read(CHUNK_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _broken_gzip(path, line, error) from error


def _broken_gzip(path: Path, line: int, error: Exception) -> DataError:
    cause = "ends too early" if isinstance(error, EOFError) else f"is damaged ({error})"
    return DataError(f"{path}: the gzip data {cause} somewhere after line {line}; copy or download the file again")


def _read_first_line(stream: IO[bytes], path: Path) -> bytes:
    try:
        line = stream.readline(MAX_LINE_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _broken_gzip(path, 1, error) from error
    text = line.removeprefix(_BOM)
    if not text.strip(b"\r\n") and _read(stream, path, 1).strip(b"\r\n"):
        raise DataError(f"{path}, line 1: the line is blank; remove it")
    return text


def _refuse_blank_line(run: Lines, path: Path) -> None:
    body = run.body
    if body.startswith((b"\n", b"\r\n")) or b"\n\n" in body or b"\n\r\n" in body:
        blank = re.search(rb"^\r?$", body, re.MULTILINE)
        assert blank is not None
        line = run.first_line + body.count(b"\n", 0, blank.start())
        raise DataError(f"{path}, line {line}: the line is blank; remove it (only the file's end may have blank lines)")

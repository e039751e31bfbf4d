"""Text files as stretches of whole lines: compression, byte order mark, blank lines at the end.

One row is one line here, so that every message can name its line; a quoted field may hold the delimiter but no line
break. That also is what lets a file be cut anywhere behind a line end, and its parts be read in any order.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Protocol, cast

import numpy as np

from data.errors import DataError
from data.sources.content import READ_BYTES, HashedStream
from data.sources.paths import File
from data.sources.source import MAX_CHUNK_ROWS

CHUNK_BYTES = 8 << 20
MAX_LINE_BYTES = 64 << 20
MAX_RATIO = 200
FREE_BYTES = 1 << 30
"""Beyond these, text has at most ``MAX_RATIO`` times the bytes of its compressed file. Click logs have 3 to 20 times as
many, a file made to fill memories and disks has 1,000."""

_HEAD_BYTES = 64 << 10
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_NOT_TEXT = {
    b"PAR1": "is a Parquet file: use data.kind: parquet (erase-rec predict: --kind parquet)",
    b"PK\x03\x04": "is a zip archive: unpack it first",
    b"BZh": "is bzip2-compressed: unpack it, or compress with gzip",
    b"\x28\xb5\x2f\xfd": "is zstd-compressed: unpack it, or compress with gzip",
    b"\xfd7zXZ": "is xz-compressed: unpack it, or compress with gzip",
    b"\xff\xfe": "is UTF-16 text: save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text: save it as UTF-8",
}


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Stretch:
    """Whole lines of a text file, the last of which is not blank.

    Attributes:
        start: position of the first byte in the text.
        length: bytes; only the file's last stretch may lack its last line end.
        first_row: number of lines before it, a header not counted.
        num_bytes: share of the file's size.
        cut_off: the file ends in the last line, without a line end.
        content: the bytes, where they cannot be read again by position (compressed text).
    """

    start: int
    length: int
    first_row: int
    num_bytes: int
    cut_off: bool
    content: bytes | None


def first_lines(file: File, count: int) -> list[bytes]:
    """Up to ``count`` lines without byte order mark and line ends; none for an empty file.

    Raises:
        DataError: the file is no plain or gzip text, or a line has no end.
    """
    packed = _is_packed(file)
    with file.open() as opened:
        stream = _Text(file, HashedStream(opened, file.name), packed)
        buffer = stream.read(_HEAD_BYTES, 1)
        while buffer.count(b"\n") < count and (more := stream.read(_HEAD_BYTES, 1)):
            buffer += more
            if len(buffer) - buffer.rfind(b"\n") > MAX_LINE_BYTES:
                raise _endless_line(file, buffer.count(b"\n") + 1)
    lines = buffer.removeprefix(_BOM).split(b"\n", count)
    # behind the last line end, or behind the last line asked for, is no line
    lines = lines[:count] if lines[-1] else lines[:-1]
    return [line.rstrip(b"\r") for line in lines]


def stretches(file: File, raw: HashedStream, *, skip_first: bool) -> Iterator[Stretch]:
    """The text in stretches of about ``CHUNK_BYTES`` or ``MAX_CHUNK_ROWS``, all lines but blank ones at the end.

    Args:
        file: plain or gzip text, as its name says.
        raw: its bytes; they are read to the end.
        skip_first: leave out the first line (a header).

    Raises:
        DataError: damaged compression, or a line over ``MAX_LINE_BYTES``.
    """
    packed = _is_packed(file)
    text = _Text(file, raw, packed)
    cutter = _Cutter(file, raw, packed, first_number=2 if skip_first else 1)
    buffer = text.read(READ_BYTES, 1)
    start = len(_BOM) if buffer.startswith(_BOM) else 0
    if skip_first:
        while b"\n" not in buffer and (more := text.read(READ_BYTES, 1)):
            buffer += more
        start = buffer.find(b"\n") + 1 or len(buffer)
    cutter.start = start
    yield from cutter.take(buffer[start:])
    while buffer := text.read(READ_BYTES, cutter.number()):
        yield from cutter.take(buffer)
    yield from cutter.finish()


class _Text:
    """What a file holds, decompressed, as a stream whose errors are a user's."""

    def __init__(self, file: File, raw: HashedStream, packed: bool) -> None:
        self._file, self._raw, self._num_bytes = file, raw, 0
        # it only ever reads, and seeks nowhere
        self._stream: _Readable = gzip.GzipFile(fileobj=cast(IO[bytes], raw), mode="rb") if packed else raw

    def read(self, size: int, line: int) -> bytes:
        """The next ``size`` bytes, fewer only at the end; about ``line`` lines were read before, for messages."""
        try:
            content = self._stream.read(size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            cause = "ends too early" if isinstance(error, EOFError) else f"is damaged ({error})"
            raise DataError(
                f"{self._file.name}: the gzip data {cause} somewhere after line {line}; copy or download the file again"
            ) from error
        self._num_bytes += len(content)
        if self._num_bytes > FREE_BYTES and self._num_bytes > MAX_RATIO * self._raw.num_bytes:
            raise DataError(
                f"{self._file.name}: the first {self._raw.num_bytes:,} bytes unpack to {self._num_bytes:,}, more than "
                f"{MAX_RATIO} times as many; unpack the file yourself if it is to be read all the same"
            )
        return content


@dataclass
class _Cutter:
    """Joins what is read to stretches.

    A stretch is given only when a line that belongs to the next one was seen: so the last one knows that it is the
    last, and blank lines, which are harmless where no line follows, are never its end.
    """

    file: File
    raw: HashedStream
    keeps_content: bool
    first_number: int
    start: int = 0
    length: int = 0
    first_row: int = 0
    rows: int = 0
    num_bytes_before: int = 0
    carry: bytes = b""
    parts: list[bytes | memoryview] = field(default_factory=list)

    def take(self, read: bytes) -> Iterator[Stretch]:
        """Adds bytes; gives the stretch before them if it is long enough."""
        end = _end_of_lines(read)
        if not end:
            # no line ends here: what was carried decides whether the line ends here are blank lines'
            read, self.carry = self.carry + read, b""
            if len(read) > MAX_LINE_BYTES:
                raise _endless_line(self.file, self.number())
            end = _end_of_lines(read)
        if end:
            if self.length >= CHUNK_BYTES or self.rows >= MAX_CHUNK_ROWS:
                yield self._stretch()
            self._add(self.carry)
            self._add(memoryview(read)[:end])
            self.carry = b""
        self.carry += read[end:]

    def finish(self) -> Iterator[Stretch]:
        """Gives the last stretch, with the line that has no line end."""
        line = self.carry.rstrip(b"\r\n")
        if line:
            self._add(line)
            self.rows += 1
        if self.length:
            yield self._stretch(cut_off=bool(line) and len(line) == len(self.carry))

    def number(self) -> int:
        """Line number of the first line that is in no stretch yet."""
        return self.first_number + self.first_row + self.rows

    def _add(self, lines: bytes | memoryview) -> None:
        self.length += len(lines)
        self.rows += count_line_ends(lines)
        if self.keeps_content:
            self.parts.append(lines)

    def _stretch(self, *, cut_off: bool = False) -> Stretch:
        stretch = Stretch(
            start=self.start,
            length=self.length,
            first_row=self.first_row,
            num_bytes=self.raw.num_bytes - self.num_bytes_before,
            cut_off=cut_off,
            content=b"".join(self.parts) if self.keeps_content else None,
        )
        self.start, self.first_row = self.start + self.length, self.first_row + self.rows
        self.length, self.rows, self.parts, self.num_bytes_before = 0, 0, [], self.raw.num_bytes
        return stretch


def count_line_ends(text: bytes | memoryview) -> int:
    """Number of LF; three times as fast as ``bytes.count``."""
    return int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n")))


def _end_of_lines(buffer: bytes) -> int:
    """Position behind the last complete line that is not blank; 0 where there is none."""
    last = buffer.rfind(b"\n")
    while last >= 0 and buffer[last] in b"\r\n":
        last -= 1
    return buffer.index(b"\n", last) + 1 if last >= 0 else 0


def _is_packed(file: File) -> bool:
    """Whether a text file is compressed.

    Raises:
        DataError: it is in another format, or its name says otherwise.
    """
    with file.open() as stream:
        magic = HashedStream(stream, file.name).read(6)
    for prefix, what in _NOT_TEXT.items():
        if magic.startswith(prefix):
            raise DataError(f"{file.name}: {what}")
    packed = magic.startswith(_GZIP)
    named = file.path.lower().endswith(".gz")
    if magic and packed != named:
        found, name = ("gzip", "does not end in .gz") if packed else ("not gzip", "ends in .gz")
        raise DataError(f"{file.name}: the content is {found} but the name {name}; rename the file")
    return packed


def _endless_line(file: File, number: int) -> DataError:
    return DataError(f"{file.name}, line {number}: no line end within {MAX_LINE_BYTES >> 20} MiB; is it text?")

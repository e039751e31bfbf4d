"""The identity of what files hold, taken while they are read anyway."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import BinaryIO

from data.sources.paths import File, readable
from data.sources.source import InputFile

READ_BYTES = 1 << 20


class HashedStream:
    """A file that is read from its start, once, and hashed on the way.

    Attributes:
        num_bytes: read so far.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        """Reads ``stream``, which the caller closes; ``name`` is for messages."""
        self._stream, self._name, self._digest = stream, name, hashlib.sha256()
        self.num_bytes = 0

    def read(self, size: int = READ_BYTES) -> bytes:
        """The next ``size`` bytes; fewer only at the end.

        Raises:
            DataError: the file cannot be read.
        """
        with readable(self._name):
            content = self._stream.read(size)
        self._digest.update(content)
        self.num_bytes += len(content)
        return content

    def read_to(self, position: int) -> None:
        """Reads on to ``position``, or to the end of a shorter file."""
        while self.num_bytes < position and self.read(min(READ_BYTES, position - self.num_bytes)):
            pass

    def finish(self) -> str:
        """Reads what is left; gives size and hex SHA-256 of the whole file as one text."""
        while self.read():
            pass
        return f"{self.num_bytes} {self._digest.hexdigest()}"


class InputFiles:
    """The files of a source.

    Attributes:
        files: in the order in which they are read.
    """

    def __init__(self, files: Sequence[File]) -> None:
        """Takes at least one file; reads nothing."""
        self.files = tuple(files)
        self._digests: dict[int, str] = {}

    def inputs(self) -> list[InputFile]:
        """Names, sizes and versions."""
        return [file.info() for file in self.files]

    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.inputs())

    def record(self, index: int, digest: str) -> None:
        """Takes what :meth:`HashedStream.finish` gave for the file at ``index``."""
        self._digests[index] = digest

    def is_recorded(self, index: int) -> bool:
        """Whether the file's content is known."""
        return index in self._digests

    def fingerprint(self) -> str:
        """Hex SHA-256 over each file's size and content digest, in order; names and places do not count.

        Reads the files whose content is not known yet.
        """
        total = hashlib.sha256()
        for index, file in enumerate(self.files):
            if not self.is_recorded(index):
                with file.open() as stream:
                    self.record(index, HashedStream(stream, file.name).finish())
            total.update(f"{self._digests[index]}\n".encode())
        return total.hexdigest()

"""From the paths of a configuration to files: local ones, and those that fsspec opens by their URL."""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from data.errors import DataError
from data.sources.source import InputFile
from erase_rec.errors import nearest

if TYPE_CHECKING:  # imported where a URL is named: it takes longer than a small file
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_LOCAL = re.compile(r"(file|local)://", re.IGNORECASE)


@dataclass(frozen=True)
class File:
    """A file to read; picklable.

    Attributes:
        name: path or URL, for messages.
        path: as its file system knows it.
        remote: the file system; None: the local one.
    """

    name: str
    path: str
    remote: AbstractFileSystem | None = None

    def open(self) -> BinaryIO:
        """Opens it for reading from the start.

        Raises:
            DataError: it cannot be opened.
        """
        with readable(self.name):
            if self.remote is None:
                return open(self.path, "rb")
            from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

            if isinstance(self.remote, MemoryFileSystem):
                # it hands out one object, with one position, to all who open a file
                return io.BytesIO(self.remote.cat_file(self.path))
            return cast(BinaryIO, self.remote.open(self.path, "rb"))

    def read(self, start: int, length: int) -> bytes:
        """Bytes ``start`` to ``start + length`` - 1.

        Raises:
            DataError: it cannot be read, or is shorter than it was.
        """
        with readable(self.name):
            if self.remote is None:
                with open(self.path, "rb") as stream:
                    stream.seek(start)
                    content: bytes = stream.read(length)
            else:
                content = self.remote.cat_file(self.path, start=start, end=start + length)
        if len(content) != length:
            raise DataError(f"{self.name}: the file was changed while it was being read; start again")
        return content

    def info(self) -> InputFile:
        """Size and version.

        Raises:
            DataError: the file is gone, or its server does not tell its size.
        """
        with readable(self.name):
            if self.remote is None:
                status = os.stat(self.path)
                return InputFile(self.name, status.st_size, str(status.st_mtime_ns))
            size = self.remote.size(self.path)
            if size is None:
                raise DataError(f"{self.name}: the server does not tell the file's size; copy the file here first")
            return InputFile(self.name, int(size), str(self.remote.ukey(self.path)))


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns what the file system refuses, now or while a file is read, into a user's error."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or str(error) or type(error).__name__})") from error


def is_url(text: str) -> bool:
    """Whether a path is one that fsspec opens: ``s3://bucket/name``, ``file:///folder/name``."""
    return _URL.match(text) is not None


def absolute(text: str) -> str:
    """A path or glob that means the same in every working directory; URLs are left alone."""
    return text if is_url(text) else str(_expanded(text).absolute())


def _expanded(text: str) -> Path:
    """The path, with ``~`` and ``~user`` at its start replaced; a user that is not there stays as it is written."""
    return Path(os.path.expanduser(text))


def resolve(patterns: Sequence[str]) -> list[File]:
    """The files that paths, globs and URLs name: in the order given, a glob's matches sorted by name.

    Raises:
        DataError: nothing matches, a folder is named, a file is named twice or may not be read, or a URL needs a
            package that is not installed.
    """
    files: list[File] = []
    for pattern in patterns:
        if _LOCAL.match(pattern):
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            files.extend(_local_matches(str(url_to_fs(pattern)[1])))
        else:
            files.extend(_remote_matches(pattern) if is_url(pattern) else _local_matches(pattern))
    seen: dict[str, File] = {}
    for file in files:
        real = os.path.realpath(file.path) if file.remote is None else file.name
        if real in seen:
            both = (
                repr(file.name) if file.name == seen[real].name else f"{seen[real].name!r} and {file.name!r} (one file)"
            )
            raise DataError(f"{both} would be read twice: name each file once among {', '.join(patterns)}")
        if file.remote is None and not os.access(file.path, os.R_OK):
            raise DataError(f"{file.name!r} cannot be read: permission denied")
        seen[real] = file
    return files


def _local_matches(pattern: str) -> list[File]:
    path = _expanded(pattern)
    if os.path.isfile(path):  # Path's own raises where a name is too long
        return [File(str(path), str(path))]
    if os.path.isdir(path):
        raise DataError(f"{pattern!r} is a folder: name its files, such as {str(path / '*')!r}")
    if glob.has_magic(pattern):
        found = [match for match in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(match)]
        if found:
            return [File(match, match) for match in found]
        raise DataError(f"no file matches {pattern!r}{_neighbours(path)}")
    raise DataError(f"file {pattern!r} not found{_neighbours(path)}")


def _neighbours(path: Path) -> str:
    """What the folder holds instead, nearest name first."""
    folder = path.parent
    while glob.has_magic(str(folder)):
        folder = folder.parent
    if not os.path.isdir(folder):
        return f"; there is no folder {str(folder)!r} (relative paths start at {os.getcwd()!r})"
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if not names:
        return f"; the folder {str(folder)!r} is empty"
    close = nearest(path.name, names)
    shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
    return f"{close} The folder {str(folder)!r} holds {shown}" if close else f"; {str(folder)!r} holds {shown}"


def _remote_matches(pattern: str) -> list[File]:
    remote, path = _file_system(pattern)
    with readable(pattern):
        if remote.isfile(path):
            return [_remote_file(remote, path)]
        if glob.has_magic(path):
            found = [match for match in sorted(remote.glob(path)) if remote.isfile(match)]
            if found:
                return [_remote_file(remote, match) for match in found]
            raise DataError(f"no file matches {pattern!r}, or none may be read with the credentials at hand")
        if remote.isdir(path):
            raise DataError(f"{pattern!r} is a folder: name its files, such as {pattern.rstrip('/') + '/*'!r}")
    raise DataError(f"file {pattern!r} not found, or it may not be read with the credentials at hand")


def _file_system(url: str) -> tuple[AbstractFileSystem, str]:
    import fsspec
    from fsspec.core import url_to_fs

    protocol = url.split("://")[0].split("::")[0]
    if protocol not in fsspec.available_protocols():
        close = nearest(protocol, fsspec.available_protocols())
        raise DataError(f"{url!r}: fsspec knows no protocol {protocol!r}{close}; a local file needs no protocol")
    try:
        remote, path = url_to_fs(url)
    except ImportError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ImportError) else None
        package = (missing or error.name or protocol).split(".")[0]
        raise DataError(f"{url!r} needs the package {package}: pip install {package} ({error})") from error
    return remote, str(path)


def _remote_file(remote: AbstractFileSystem, path: str) -> File:
    return File(str(remote.unstrip_protocol(path)), path, remote)

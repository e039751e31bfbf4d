"""From the paths of a configuration to files, and to the identity of what they hold."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from data.errors import DataError
from erase_rec.errors import nearest


def resolve(patterns: Sequence[str]) -> list[Path]:
    """The files that paths and globs name: in the order given, a glob's matches sorted by name.

    Raises:
        DataError: nothing matches, a folder is named, a file is named twice or may not be read.
    """
    files: list[Path] = []
    for pattern in patterns:
        files.extend(_matches(pattern))
    seen: dict[str, Path] = {}
    for file in files:
        real = os.path.realpath(file)
        if real in seen:
            both = repr(str(file)) if file == seen[real] else f"{str(seen[real])!r} and {str(file)!r} (one file)"
            raise DataError(f"{both} would be read twice: name each file once among {', '.join(patterns)}")
        if not os.access(file, os.R_OK):
            raise DataError(f"{str(file)!r} cannot be read: permission denied")
        seen[real] = file
    return files


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        raise DataError(f"{pattern!r} is a folder: name its files, such as {str(path / '*')!r}")
    if glob.has_magic(pattern):
        found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(match)]
        if found:
            return found
        raise DataError(f"no file matches {pattern!r}{_neighbours(path)}")
    raise DataError(f"file {pattern!r} not found{_neighbours(path)}")


def _neighbours(path: Path) -> str:
    """What the folder holds instead, nearest name first."""
    folder = path.parent
    while glob.has_magic(str(folder)):
        folder = folder.parent
    if not folder.is_dir():
        return f"; there is no folder {str(folder)!r} (relative paths start at {os.getcwd()!r})"
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if not names:
        return f"; the folder {str(folder)!r} is empty"
    close = nearest(path.name, names)
    shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
    return f"{close} The folder {str(folder)!r} holds {shown}" if close else f"; {str(folder)!r} holds {shown}"


def content_fingerprint(files: Sequence[Path]) -> str:
    """Hex SHA-256 over each file's size and content digest, in order; names and places do not count."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        total.update(f"{file.stat().st_size} {content}\n".encode())
    return total.hexdigest()

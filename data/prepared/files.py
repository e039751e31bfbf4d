"""Files that are whole or not there, whenever the process or the machine stops."""

from __future__ import annotations

import os
from pathlib import Path


def publish_text(path: Path, text: str) -> None:
    """Writes beside the place, waits for the disk and renames."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def sync_folder(folder: Path) -> None:
    """Waits until the names of a folder's files are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

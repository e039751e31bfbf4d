"""What a fuzz target is: a reader, inputs for it, and what must hold of every one of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuzz_mutations import any_bytes
from hypothesis import strategies as st

from erase_rec.errors import UserError

MAX_MESSAGE = 60_000
"""Characters: the one message of a refusal is to be read by a human."""


@dataclass(frozen=True)
class Opened:
    """A target that is ready.

    Attributes:
        inputs: what it is tried with.
        read: reads an input; what it raises other than UserError is a fault, as is a wrong value (AssertionError).
        examples: inputs that are always tried; the first one is valid.
    """

    inputs: st.SearchStrategy[bytes]
    read: Callable[[bytes], None]
    examples: Sequence[bytes] = ()


@dataclass(frozen=True)
class Target:
    """A reader of files that a user, a crash or an attacker may have written.

    Attributes:
        name: as on the command line; of its folder in the corpus.
        about: what it reads, and what a right value is.
        open: makes it ready; it may write in the folder given.
    """

    name: str
    about: str
    open: Callable[[Path], Opened]


def attempt(opened: Opened, content: bytes) -> bool:
    """Reads an input; whether it was accepted. A refusal must be one message that says something."""
    try:
        opened.read(content)
    except UserError as error:
        message = str(error)
        assert message.strip(), "a refusal without a message"
        assert len(message) <= MAX_MESSAGE, f"a message of {len(message)} characters: {message[:200]}"
        assert "Traceback" not in message, message
        return False
    return True


class Folder:
    """A folder of valid files, one of which an input replaces: ``NAME NUL CONTENT``."""

    def __init__(self, valid: Path, copy: Path) -> None:
        """Takes the valid folder, and where its copy is made."""
        self.valid, self.copy = valid, copy
        self.files: Mapping[str, bytes] = {
            str(path.relative_to(valid)): path.read_bytes() for path in sorted(valid.rglob("*")) if path.is_file()
        }

    def inputs(self, tokens: Sequence[bytes], names: Sequence[str] = ()) -> st.SearchStrategy[bytes]:
        """Edits of any of the files named, or of all."""
        chosen = [(name, content) for name, content in self.files.items() if not names or name in names]
        return st.one_of(
            *(
                any_bytes([content], tokens).map(lambda edited, name=name: name.encode() + b"\0" + edited)
                for name, content in chosen
            )
        )

    def valid_input(self) -> bytes:
        """An input that changes nothing."""
        name, content = next(iter(self.files.items()))
        return name.encode() + b"\0" + content

    def with_input(self, content: bytes) -> Path:
        """A copy with one file replaced; a name that is not of the folder stands for its first file."""
        name, _, edited = content.partition(b"\0")
        found = name.decode(errors="replace")
        if found not in self.files:
            found = next(iter(self.files))
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.valid, self.copy)
        (self.copy / found).write_bytes(edited)
        return self.copy

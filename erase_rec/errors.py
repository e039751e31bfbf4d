"""Errors that are a user's to mend. The command line prints them without a traceback and exits with code 2."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

MAX_CHARACTERS = 4000
"""Of a message: what a file or a command line holds is quoted in messages, and can be of any length."""
MAX_PROBLEMS = 50
MAX_NAME = 200


class UserError(ValueError):
    """Says what is wrong, where, what was expected and the way out."""

    def __init__(self, message: str = "") -> None:
        """Takes the message; of a very long one the middle is left out."""
        super().__init__(shortened(message, MAX_CHARACTERS))


class ConfigError(UserError):
    """All problems of a configuration at once, one a line."""

    def __init__(self, problems: Sequence[str]) -> None:
        """Takes one sentence a problem, each with its place."""
        self.problems = tuple(problems)
        count = len(self.problems)
        heading = "1 problem in the configuration" if count == 1 else f"{count} problems in the configuration"
        shown = [shortened(problem, MAX_CHARACTERS // 4) for problem in self.problems[:MAX_PROBLEMS]]
        more = [f"and {count - MAX_PROBLEMS} more"] if count > MAX_PROBLEMS else []
        ValueError.__init__(self, "\n  - ".join((f"{heading}:", *shown, *more)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        """Pickled by its problems: errors travel between processes."""
        return type(self), (self.problems,)


def shortened(text: str, most: int) -> str:
    """``text`` with its middle left out where it has more than ``most`` characters; start and end say the most."""
    if len(text) <= most:
        return text
    return f"{text[: most * 3 // 4]} [...] {text[-most // 4 :]}"


def closest(name: str, valid: Sequence[str]) -> str | None:
    """The valid name that ``name`` was probably meant to be; a name that goes on and on is no misspelt one."""
    if len(name) > MAX_NAME:
        return None
    return next(iter(get_close_matches(name, valid, n=1, cutoff=0.6)), None)


def nearest(name: str, valid: Sequence[str]) -> str:
    """``; did you mean 'x'?`` for a misspelt name, or an empty text."""
    found = closest(name, valid)
    return "" if found is None else f"; did you mean {found!r}?"

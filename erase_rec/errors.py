"""Errors that are a user's to mend. The command line prints them without a traceback and exits with code 2."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class UserError(ValueError):
    """Says what is wrong, where, what was expected and the way out."""


class ConfigError(UserError):
    """All problems of a configuration at once, one a line."""

    def __init__(self, problems: Sequence[str]) -> None:
        """Takes one sentence a problem, each with its place."""
        self.problems = tuple(problems)
        count = len(self.problems)
        heading = "1 problem in the configuration" if count == 1 else f"{count} problems in the configuration"
        super().__init__("\n  - ".join((f"{heading}:", *self.problems)))


def closest(name: str, valid: Sequence[str]) -> str | None:
    """The valid name that ``name`` was probably meant to be."""
    return next(iter(get_close_matches(name, valid, n=1, cutoff=0.6)), None)


def nearest(name: str, valid: Sequence[str]) -> str:
    """``; did you mean 'x'?`` for a misspelt name, or an empty text."""
    found = closest(name, valid)
    return "" if found is None else f"; did you mean {found!r}?"

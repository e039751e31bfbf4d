"""Errors of the data's way that are a user's to mend."""

from __future__ import annotations

from erase_rec.errors import UserError


class DataError(UserError):
    """Input that cannot be read as configured: names the file, the line or column, the cause and the way out."""

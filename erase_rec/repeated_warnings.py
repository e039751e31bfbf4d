"""Warnings that come again and again are shown once, and counted.

A library that warns in every step, or in every worker, would push everything else off the screen.
"""

from __future__ import annotations

import logging
from collections import Counter

MOST_ALIKE = 5
"""Warnings that differ only in what they name are shown so often."""


class RepeatFilter(logging.Filter):
    """Passes a warning the first time; of those that are alike but for what they name, the first few.

    Attributes:
        held_back: how often each first text of its kind was held back.
    """

    def __init__(self) -> None:
        """Has seen nothing."""
        super().__init__()
        self.held_back: Counter[str] = Counter()
        self._kinds: dict[tuple[str, str], list[str]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be shown. Errors always are."""
        if record.levelno > logging.WARNING:
            return True
        text = record.getMessage()
        shown = self._kinds.setdefault((record.name, str(record.msg)), [])
        if text in shown:
            self.held_back[text] += 1
            return False
        if len(shown) == MOST_ALIKE:
            self.held_back[shown[0]] += 1
            return False
        shown.append(text)
        return True

    def conclusion(self) -> list[str]:
        """What was held back, a line a warning."""
        return [f"{count:,} more like this: {text}" for text, count in self.held_back.items()]

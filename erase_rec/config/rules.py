"""What a rule on combinations of settings is. The rules themselves are data, in the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from erase_rec.config.document import KeyPath
from erase_rec.config.schema import Config


@dataclass(frozen=True)
class Finding:
    """A place where a rule is broken.

    Attributes:
        path: the key that is reported.
        found: what is there.
        also: other keys that the finding rests on.
        hint: nearest valid name, or empty.
        way_out: what to write instead, where it differs from place to place; empty: the rule's.
    """

    path: KeyPath
    found: str
    also: tuple[KeyPath, ...] = ()
    hint: str = ""
    way_out: str = ""


@dataclass(frozen=True)
class Rule:
    """A combination that is refused.

    Attributes:
        refused: the combination, for the documentation.
        reason: why.
        way_out: what to write instead.
        find: the places of a configuration, presets applied, that break the rule.
    """

    refused: str
    reason: str
    way_out: str
    find: Callable[[Config], Iterable[Finding]]

    def message(self, finding: Finding) -> str:
        """Found, reason, way out, nearest name."""
        parts = (finding.found, self.reason, finding.way_out or self.way_out)
        return "; ".join(filter(None, parts)) + finding.hint

"""What the tensors of a checkpoint are called, and what they are called in another model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from erase_rec.errors import UserError, nearest

MODEL, TABLES, TABLE_STATES, STATES = "model/", "tables/", "table_optimizer/", "optimizer/"
"""What names start with: dense parameters and buffers, tables, and the optimizers' states of tables and parameters."""
DENSE_FEATURE = "dense/"
"""What stands before a dense feature's name, which no tensor has, where it is renamed."""

OVER_ARCH = "over_arch"
"""The unit of the over-arch; the other units are ``tables/<feature>`` and ``towers.<name>``."""

_TOWER = "towers."


class Renaming:
    """Maps names of a checkpoint to those of a model: the first pattern that fits a name, or the name itself."""

    def __init__(self, patterns: Mapping[str, str], known: Iterable[str]) -> None:
        """Takes the patterns.

        Args:
            patterns: new name by old name; ``*`` stands for anything, and for the same in the new name.
            known: names that may be renamed: tensors without optimizer states, and dense features.

        Raises:
            UserError: a pattern fits no name or has other stars than its new name, or two names become one.
        """
        self._rules = [(_expression(old), new) for old, new in patterns.items()]
        names = sorted(known)
        for (expression, _), (old, new) in zip(self._rules, patterns.items(), strict=True):
            where = f"train.init_from.rename: {old!r}"
            if old.count("*") != new.count("*"):
                raise UserError(f"{where} has {old.count('*')} '*' and {new!r} has {new.count('*')}; give both as many")
            if not any(expression.fullmatch(name) for name in names):
                raise UserError(
                    f"{where} fits nothing in the checkpoint{nearest(old, names)} (names are those of "
                    "its tensors, such as tables/user and model/towers.cross.*, or dense/age)"
                )
        found: dict[str, str] = {}
        for name in names:
            new = self.plain(name)
            if new in found:
                raise UserError(f"train.init_from.rename: {found[new]!r} and {name!r} both become {new!r}; rename one")
            found[new] = name

    def plain(self, name: str) -> str:
        """The new name of a tensor that is no optimizer state, or of a dense feature."""
        for expression, new in self._rules:
            if (match := expression.fullmatch(name)) is not None:
                fixed, groups = new.split("*"), (*match.groups(), "")
                return "".join(part + group for part, group in zip(fixed, groups, strict=True))
        return name

    def __call__(self, name: str) -> str:
        """The new name of any tensor: an optimizer's state follows what it is of."""
        for states, values in ((TABLE_STATES, TABLES), (STATES, MODEL)):
            if name.startswith(states):
                value, _, entry = name.removeprefix(states).rpartition("/")
                return f"{states}{self.plain(f'{values}{value}').removeprefix(values)}/{entry}"
        return self.plain(name)


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)


def unit_of(name: str) -> str | None:
    """What is taken as a whole: ``tables/<feature>``, ``towers.<name>`` or ``over_arch``; None: not of a model.

    An optimizer's state belongs to the unit of what it is of.
    """
    if name.startswith(TABLES):
        return name
    if name.startswith(TABLE_STATES):
        return f"{TABLES}{name.removeprefix(TABLE_STATES).rpartition('/')[0]}"
    for prefix in (MODEL, STATES):
        if name.startswith(prefix):
            parts = name.removeprefix(prefix).split(".")
            return f"{_TOWER}{parts[1]}" if name.startswith(f"{prefix}{_TOWER}") else parts[0].partition("/")[0]
    return None


def is_state(name: str) -> bool:
    """Whether it is of an optimizer."""
    return name.startswith((TABLE_STATES, STATES))


def unit_of_tower(name: str) -> str:
    """The unit of the tower of that name."""
    return f"{_TOWER}{name}"

"""The configuration as people write it: from YAML, a dictionary, a DataFrame, or section by section in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import PrivateAttr

from erase_rec.config import schema
from erase_rec.config.document import Node, node_of, parse_document
from erase_rec.config.load import complete, dump_document, find_config
from erase_rec.config.merge import read_with_bases

if TYPE_CHECKING:
    import pandas as pd

PLACE = "Config"
"""Where a value that was written in Python stands, for messages."""


class Config(schema.Config):
    """A configuration; immutable. It holds what was written: :meth:`resolved` fills the rest.

    ``Config(data=DataConfig(...), features=FeaturesConfig(...), towers=(TowerConfig(...),))`` builds one in Python.
    Types are checked there (pydantic's ``ValidationError``), everything else by :meth:`resolved`, which a trainer calls
    first. The other ways in check the whole at once.
    """

    _document: Node = PrivateAttr()
    _name: str = PrivateAttr(default="python")

    def model_post_init(self, context: Any, /) -> None:
        """Keeps what was written."""
        self._document = node_of(self.model_dump(mode="json", exclude_unset=True), PLACE)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # parameters of components are dictionaries

    @classmethod
    def from_yaml(cls, name_or_path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Reads a file, or the shipped configuration of that name, such as ``ctr_erase.yaml``.

        Args:
            name_or_path: ``.yaml`` may be left out.
            overrides: ``key=value`` texts, as on the command line.

        Raises:
            UserError: no such file.
            ConfigError: all that is wrong with it, with file and line.
        """
        path = find_config(name_or_path)
        document, problems = read_with_bases(path)
        return cls._of(document, overrides, name=path.stem, problems=problems)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """From plain data of the same form as a YAML file.

        Raises:
            ConfigError: all that is wrong with it.
        """
        return cls._of(node_of(document, PLACE), name="python")

    @classmethod
    def from_frame(
        cls,
        frame: pd.DataFrame,
        label: str,
        *,
        positive: Sequence[str] = (),
        at_least: float | None = None,
        overrides: Sequence[str] = (),
    ) -> Self:
        """A configuration that trains on a DataFrame, chosen by a look at it as ``erase-rec init`` looks at a file.

        Args:
            frame: training rows.
            label: the column that says whether there was a click.
            positive: labels that mean a click; none: they are told by the values.
            at_least: a click is a label of at least this: ratings.
            overrides: ``key=value`` texts, such as ``train.epochs=2``.

        Raises:
            UserError: the label or its rule does not fit the frame.
        """
        from data.frames import FrameSource
        from erase_rec.api.init_page import Input, configuration

        text, _ = configuration(Input("the DataFrame", "pandas", FrameSource(frame)), label, positive, at_least)
        document, problems = parse_document(text, "Config.from_frame")
        return cls._of(document, overrides, name="frame", problems=problems)

    @classmethod
    def _of(cls, document: Node, overrides: Sequence[str] = (), *, name: str, problems: Sequence[str] = ()) -> Self:
        from erase_rec.api.assembly import ContentCatalog

        written, _ = complete(document, overrides, catalog=ContentCatalog(), problems=problems)
        config = cls.model_validate(written.plain())
        config._document, config._name = written, name
        return config

    def override(self, *changes: str) -> Self:
        """A copy with other values.

        Args:
            changes: ``key=value`` texts, as on the command line: ``train.steps=200``, ``towers.cross.loss.weight=0.5``.

        Raises:
            ConfigError: all that is wrong with the result.
        """
        return self._of(self._document, changes, name=self._name)

    @property
    def name(self) -> str:
        """What run folders are named after where ``run.name`` is not set: the file's stem."""
        return self._name

    def to_yaml(self) -> str:
        """What was written, as YAML that :meth:`from_yaml` reads as an equal configuration."""
        return dump_document(self._document)

    def resolved(self) -> schema.Config:
        """The complete configuration: preset, defaults and ``params`` filled, all combinations checked.

        Raises:
            ConfigError: all that is wrong with it.
        """
        from erase_rec.api.assembly import ContentCatalog

        return complete(self._document, catalog=ContentCatalog())[1]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; :meth:`override` also checks."""
        copied = super().model_copy(update=update, deep=deep)
        if update:
            copied._document = node_of(copied.model_dump(mode="json", exclude_unset=True), PLACE)
        return copied

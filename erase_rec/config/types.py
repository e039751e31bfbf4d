"""Field types of the configuration: the schema, not the YAML text, decides what a value is.

The loader hands every plain YAML scalar over as text (``null`` aside), so ``101`` is a name where a name is
expected and ``1e-3`` is a number where a number is expected. The types here turn text into values and refuse
everything else; values that are already typed (configurations built in Python) pass through the same checks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Model(BaseModel):
    """Base of every configuration section: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Params(Model):
    """Base of the ``params`` section of a registered component (tower, local loss, data source)."""


class TowerParams(Params):
    """``params`` of a tower; subclasses sit beside the tower that they configure."""

    @property
    def liftable(self) -> int:
        """How many of the tower's last layers can be above its cut."""
        return 0

    def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
        """Says what is wrong with these parameters for the tower's inputs.

        Args:
            dense_dim: columns of its dense input: dense features and the outputs of the towers that it reads.
            embedding_dims: embedding dimension of each sparse feature that the tower reads.

        Returns:
            One sentence a problem; empty when the tower can be built.
        """
        return []

    @abstractmethod
    def output_dim(self, dense_dim: int, embedding_dims: Sequence[int]) -> int:
        """Columns of the tower's output for inputs without problems."""


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("expected a number, found a boolean")
    if isinstance(value, int | float):
        number = float(value)
    elif isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"expected a number, found {value!r}") from None
    else:
        raise ValueError(f"expected a number, found {type(value).__name__}")
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, found {value!r}")
    return number


def _integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass  # 1e3 is an integer too: decided below
    try:
        number = _number(value)
    except ValueError as error:
        raise ValueError(str(error).replace("a number", "a whole number")) from None
    if number != int(number):
        raise ValueError(f"expected a whole number, found {value!r}")
    return int(number)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    raise ValueError(f"expected true or false, found {value!r}")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"expected text, found {value!r}")


def _one_or_many(value: Any) -> Any:
    if value is None:
        return ()
    return [value] if isinstance(value, str) else value


def _selection(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_text(item) for item in value)
    try:
        return _boolean(value)
    except ValueError:
        raise ValueError(f"expected true, false or a list of names, found {value!r}") from None


Number = Annotated[float, BeforeValidator(_number)]
Integer = Annotated[int, BeforeValidator(_integer)]
Boolean = Annotated[bool, BeforeValidator(_boolean)]
Text = Annotated[str, BeforeValidator(_text)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_one_or_many)]
"""One text or a list of texts; null: no text."""
Selection = Annotated[bool | tuple[str, ...], BeforeValidator(_selection)]
"""Everything (true), nothing (false), or a list of names."""


class ProjectedTowerParams(TowerParams):
    """``params`` of a tower whose output has as many columns as one asks for."""

    out_dim: Annotated[Integer, Field(gt=0)] = 64
    """Columns of the tower's output."""

    def output_dim(self, dense_dim: int, embedding_dims: Sequence[int]) -> int:
        """``out_dim``."""
        return self.out_dim


class ProjectedLastParams(ProjectedTowerParams):
    """``params`` of a tower that ends in one linear projection, which alone can be above its cut."""

    @property
    def liftable(self) -> int:
        """1."""
        return 1

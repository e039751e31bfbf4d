"""What the source says below a field of the configuration.

Pydantic can read these texts itself (``use_attribute_docstrings``), but does so for every class when the schema is
imported, which costs each command half a second; here they are read when documentation is written.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache

from pydantic import BaseModel


@cache
def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Field name -> the text below the field, on one line; fields without one are left out, inherited ones are in."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _own(base)
    return {name: text for name, text in found.items() if name in model.model_fields}


def _own(model: type[BaseModel]) -> dict[str, str]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(inspect.cleandoc(text.value.value).split())
        for field, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }

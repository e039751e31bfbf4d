"""JSON Schema of configuration files, for editors: completion, descriptions, and mistakes marked while typing.

It says what a file may look like; :mod:`erase_rec.config.load` remains the judge, and knows the rules on combinations.
Draft 7, because that is what the YAML language server reads. Where the loader takes a plain scalar as text or as a
number (``200_000``, ``1e-3``), so does the schema. A file with ``_base_`` may leave out everything and change single
items of lists by name, so it is held against a second form of each section, whose name ends in ``.change``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from erase_rec.config import schema
from erase_rec.config.catalog import Catalog, Group
from erase_rec.config.field_docs import field_docs
from erase_rec.config.merge import BASE
from erase_rec.config.schema import SCHEMA_VERSION, Config

Schema = dict[str, Any]

COMPONENTS: Mapping[str, Group] = {
    "DataConfig": "source",
    "TowerConfig": "tower",
    "HeadConfig": "head",
    "LossConfig": "local_loss",
}
"""Sections whose ``params`` belong to their ``kind``."""
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
_NUMBER = r"^[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?$"
_SCALAR = ["string", "number", "boolean"]


def json_schema(catalog: Catalog) -> Schema:
    """The schema of a configuration file.

    Args:
        catalog: the towers, heads, local losses and sources that may be named.
    """
    builder = _Builder(catalog)
    whole, change = (builder.reference("Config", Config, change=change) for change in (False, True))
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": f"urn:erase-rec:config:{SCHEMA_VERSION}",
        "title": "erase-rec configuration",
        "type": "object",
        "if": {"required": [BASE]},
        "then": change,
        "else": whole,
        "$defs": builder.definitions,
    }


class _Builder:
    """Turns pydantic's schemas into those of what the loader reads."""

    def __init__(self, catalog: Catalog) -> None:
        self.definitions: dict[str, Schema] = {}
        self._catalog = catalog

    def reference(self, name: str, model: type[BaseModel], *, change: bool) -> Schema:
        """A reference to the definition of ``model``, which is made when it is first needed."""
        key = f"{name}.change" if change else name
        if key not in self.definitions:
            self.definitions[key] = {}  # an own reference inside it finds it
            self.definitions[key] = self._section(name, model, change=change)
        return {"$ref": f"#/$defs/{key}"}

    def _section(self, name: str, model: type[BaseModel], *, change: bool) -> Schema:
        found = model.model_json_schema()
        docs = field_docs(model)
        properties: dict[str, Schema] = {}
        for key, plain in found.get("properties", {}).items():
            properties[key] = self._value(plain, change=change)
            properties[key] |= {word: plain[word] for word in ("default",) if word in plain and not change}
            if key in docs:
                properties[key]["description"] = docs[key].replace("``", "`")
        section: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        if model.__doc__:
            section["description"] = model.__doc__.strip().replace("``", "`")
        if not change and "required" in found:
            section["required"] = found["required"]
        if name == "Config":
            properties[BASE] = {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
                "description": "Configurations that this one changes; the path is relative to this file, or shipped.",
            }
        if name in COMPONENTS:
            self._add_params(section, model, COMPONENTS[name], change=change)
        return section

    def _add_params(self, section: Schema, model: type[BaseModel], group: Group, *, change: bool) -> None:
        """``params`` by kind. In a change the kind may be inherited: then they can be anything."""
        properties = section["properties"]
        kinds = list(self._catalog.kinds(group))
        properties["kind"] |= {"enum": kinds}
        properties["kind"].pop("type", None)
        section["allOf"] = []
        for kind in kinds:
            params = self.reference(f"{group}.{kind}", self._catalog.params_model(group, kind), change=change)
            is_default = model.model_fields["kind"].default == kind and not change
            condition: Schema = {"properties": {"kind": {"const": kind}}}
            if not is_default:
                condition["required"] = ["kind"]
            then = {"properties": {"params": {"anyOf": [params, {"type": "null"}]}}}
            section["allOf"].append({"if": condition, "then": then})

    def _value(self, plain: Schema, *, change: bool) -> Schema:
        """What a file may hold where pydantic expects ``plain``."""
        if "$ref" in plain:
            name = plain["$ref"].rpartition("/")[2]
            return self.reference(name, getattr(schema, name), change=change)
        if "anyOf" in plain:
            takes_booleans = any(option.get("type") == "boolean" for option in plain["anyOf"])
            options = [self._value(option, change=change) for option in plain["anyOf"]]
            if takes_booleans:  # true, false or a list of names: a single name means neither
                options = [option["anyOf"][0] if "anyOf" in option else option for option in options]
            return {"anyOf": options}
        if "enum" in plain or "const" in plain:
            return {word: plain[word] for word in ("enum", "const") if word in plain}
        match plain.get("type"):
            case "integer" | "number":
                bounds = {word: plain[key] for key, word in _BOUNDS.items() if key in plain}
                return {"anyOf": [{"type": plain["type"], **bounds}, {"type": "string", "pattern": _NUMBER}]}
            case "string":
                return {"type": _SCALAR}
            case "array":
                return self._list(plain, change=change)
            case "object":
                return {"type": ["object", "null"]}
            case _:
                return {"type": plain["type"]}

    def _list(self, plain: Schema, *, change: bool) -> Schema:
        """A list; of texts also a single one, of features also bare names, in a change also items by name."""
        item = self._value(plain["items"], change=False)
        of_texts = item == {"type": _SCALAR}
        if plain["items"].get("$ref", "").endswith("FeatureConfig"):
            item = {"anyOf": [{"type": _SCALAR}, item]}
        options: list[Schema] = [{"type": "array", "items": item}]
        if "minItems" in plain:
            options[0]["minItems"] = plain["minItems"]
        if of_texts:
            options.append({"type": [*_SCALAR, "null"]})
        if change:
            options.append({"type": "object", "additionalProperties": self._value(plain["items"], change=True)})
        return {"anyOf": options} if len(options) > 1 else options[0]

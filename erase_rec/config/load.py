"""Loads a configuration: file, bases, overrides, schema, defaults, preset, components, rules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import isfile  # Path's own raises where a name is too long
from pathlib import Path
from typing import Any

import yaml

from erase_rec import __version__
from erase_rec.config.catalog import Catalog
from erase_rec.config.components import fill_params
from erase_rec.config.document import KeyPath, Node, TextLoader, display, kind_of
from erase_rec.config.feature_defaults import IDLE_DEFAULTS, apply_feature_defaults
from erase_rec.config.legality import RULES
from erase_rec.config.merge import SHIPPED, merge, names_beside, read_with_bases
from erase_rec.config.overrides import parse_overrides
from erase_rec.config.presets import apply_preset
from erase_rec.config.rules import Rule
from erase_rec.config.schema import SCHEMA_VERSION, Config
from erase_rec.config.validate import Problem, Validated, validate_config
from erase_rec.errors import ConfigError, UserError, nearest

PRESET: KeyPath = ("schedule", "preset")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration that can be run.

    Attributes:
        config: complete: defaults, preset and ``params`` filled, all combinations checked.
        path: the file.
        name: the file's stem.
        hash: 16 hexadecimal digits; equal for equal configurations, ``run`` aside.
    """

    config: Config
    path: Path
    name: str
    hash: str


def load_config(name_or_path: str | Path, overrides: Sequence[str] = (), *, catalog: Catalog) -> LoadedConfig:
    """Reads a configuration, also the ``config.yaml`` of a run folder, which comes back as it was.

    Args:
        name_or_path: a path, or the name of a shipped configuration; ``.yaml`` may be left out.
        overrides: ``key=value`` texts, see :mod:`erase_rec.config.overrides`.
        catalog: towers, local losses and sources that may be named.

    Raises:
        UserError: no such file.
        ConfigError: what is wrong with it, all of it.
    """
    path = find_config(name_or_path)
    document, problems = read_with_bases(path)
    _, config = complete(document, overrides, catalog=catalog, problems=problems)
    return LoadedConfig(config, path, path.stem, config_hash(config))


def complete(
    document: Node, overrides: Sequence[str] = (), *, catalog: Catalog, problems: Sequence[str] = ()
) -> tuple[Node, Config]:
    """Changes what was written by overrides, fills the rest and checks the whole.

    Args:
        document: without ``_base_``.
        overrides: ``key=value`` texts.
        catalog: towers, local losses and sources that may be named.
        problems: what was found wrong while the document was read.

    Returns:
        What is written after the overrides, and the complete configuration.

    Raises:
        ConfigError: what is wrong, all of it.
    """
    patch, more = parse_overrides(overrides, document)
    said = [*problems, *more]
    document, more = merge(document, patch)
    said += more
    _refuse_other_version(document)
    config, found = _resolve(document, catalog, preset_overridden=len(list(patch.descend(PRESET))) > len(PRESET))
    said += [
        f"{document.place_of(problem.path)}: {document.shown(problem.path)}: {problem.message}" for problem in found
    ]
    if said:
        raise ConfigError(list(dict.fromkeys(said)))
    assert config is not None
    return document, config


def _refuse_other_version(document: Node) -> None:
    """One message: what else is wrong in a file of another version says nothing."""
    path: KeyPath = ("schema_version",)
    version = document.child("schema_version", ())
    if version is not None and version.value not in (None, str(SCHEMA_VERSION)):
        place, found = document.place_of(path), kind_of(version.plain())
        raise ConfigError(
            [
                f"{place}: schema_version: found {found}, expected {SCHEMA_VERSION}, "
                f"which erase-rec {__version__} reads; use the erase-rec that the file was written for, or change the "
                "file to this version (erase-rec schema prints its schema)"
            ]
        )


def find_config(name_or_path: str | Path) -> Path:
    """Looks up a configuration: as given, then in the checkout's ``configs/``, each also with ``.yaml``.

    Raises:
        UserError: there is none; says where it looked and what there is.
    """
    name = Path(name_or_path)
    folders = (Path(), SHIPPED)
    candidates = [folder / spelt for folder in folders for spelt in (name, Path(f"{name}.yaml"))]
    for candidate in candidates:
        if isfile(candidate):
            return candidate.resolve()
    shipped = sorted(path.name for path in SHIPPED.glob("*.yaml"))
    beside = names_beside(name, "*.yaml")
    looked = ", ".join(dict.fromkeys(display(candidate) for candidate in candidates))
    raise UserError(
        f"configuration {str(name_or_path)!r} not found; looked for {looked}"
        f"{nearest(f'{name.stem}.yaml', [*shipped, *beside])}; shipped: {', '.join(shipped) or 'none'}"
    )


def dump_config(config: Config) -> str:
    """YAML that :func:`load_config` reads as an equal configuration."""
    return _dump(config.model_dump(mode="json"), _TextDumper)


def dump_document(document: Node) -> str:
    """YAML that is read as an equal document; numbers stand without quotes, as people write them."""
    return _dump(document.plain(), _DocumentDumper)


def _dump(plain: Any, dumper: type[_TextDumper]) -> str:
    return yaml.dump(plain, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120)


def config_hash(config: Config) -> str:
    """Hash of everything but ``schema_version`` and ``run``, which say nothing of what results are."""
    text = json.dumps(config.model_dump(mode="json", exclude={"schema_version", "run"}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _TextDumper(yaml.SafeDumper):
    """PyYAML writes line breaks such as U+0085 as they are, and reads them back as spaces; here they are escaped."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_TextDumper.add_representer(str, _TextDumper.represent_text)


class _DocumentDumper(_TextDumper):
    """All scalars are text; in quotes stands what the loader would read as something else."""

    yaml_implicit_resolvers = TextLoader.yaml_implicit_resolvers


def _resolve(document: Node, catalog: Catalog, *, preset_overridden: bool) -> tuple[Config | None, list[Problem]]:
    validated = validate_config(document.plain())
    problems = list(validated.problems)
    if validated.config is None:
        return None, problems
    problems += _broken([IDLE_DEFAULTS], validated.config, validated)
    config, filled = apply_preset(apply_feature_defaults(validated.config))
    if preset_overridden and not filled:
        message = "has no effect: the file says itself all that a preset fills; override those keys"
        problems.append(Problem(PRESET, message))
    config, more = fill_params(config, validated, catalog)
    problems += more
    problems += _broken(RULES, config, validated)
    return config, problems


def _broken(rules: Iterable[Rule], config: Config, validated: Validated) -> Iterator[Problem]:
    """Rules broken by what the user wrote; values put in for wrong ones break none."""
    for rule in rules:
        for finding in rule.find(config):
            if all(map(validated.trusts, (finding.path, *finding.also))):
                yield Problem(finding.path, rule.message(finding))

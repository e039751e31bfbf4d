"""Checks the ``params`` of towers, local losses and sources against the catalog, and fills their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from erase_rec.config.catalog import Catalog, Group
from erase_rec.config.document import KeyPath
from erase_rec.config.schema import Config, HeadConfig, LossConfig, TowerConfig
from erase_rec.config.types import Params, TowerParams
from erase_rec.config.validate import Problem, Validated, validate_params
from erase_rec.errors import nearest

_NOUN: Mapping[Group, str] = {
    "tower": "tower",
    "head": "local head",
    "local_loss": "local loss",
    "source": "data source",
}


def fill_params(config: Config, validated: Validated, catalog: Catalog) -> tuple[Config, list[Problem]]:
    """Replaces every ``params`` by its checked, complete form.

    Args:
        config: feature defaults applied.
        validated: says which keys of ``config`` are the user's.
        catalog: what is registered.

    Returns:
        The configuration and the problems found; ``params`` with a problem stay as they are.
    """
    check = _Check(validated, catalog)
    source = check.params("source", config.data.kind, config.data.params, ("data",))
    data = config.data if source is None else config.data.model_copy(update={"params": _plain(source)})
    towers = tuple(check.tower(config, tower, ("towers", at)) for at, tower in enumerate(config.towers))
    return config.model_copy(update={"data": data, "towers": towers}), check.problems


class _Check:
    def __init__(self, validated: Validated, catalog: Catalog) -> None:
        self.problems: list[Problem] = []
        self._validated, self._catalog = validated, catalog
        self._output_dims: dict[str, int] = {}

    def params(self, group: Group, kind: str, values: Mapping[str, Any], path: KeyPath) -> Params | None:
        """The checked ``params`` of the component at ``path``; None where there is a problem."""
        if not self._validated.trusts((*path, "kind")):
            return None
        kinds = list(self._catalog.kinds(group))
        if kind not in kinds:
            message = f"no {_NOUN[group]} is called {kind!r}{nearest(kind, kinds)} (there are: {', '.join(kinds)})"
            self.problems.append(Problem((*path, "kind"), message))
            return None
        params, problems = validate_params(self._catalog.params_model(group, kind), values, (*path, "params"))
        self.problems += problems
        return params

    def tower(self, config: Config, tower: TowerConfig, path: KeyPath) -> TowerConfig:
        """The tower with checked ``params``, its head's and its loss's too."""
        update: dict[str, Any] = {}
        params = self.params("tower", tower.kind, tower.params, path)
        if params is not None:
            update["params"] = _plain(params)
            self._fit(config, tower, params, path)
            self._lift(tower, params, path)
        update["head"] = self._head(tower.head, (*path, "head"))
        if tower.loss is not None:
            update["loss"] = self._loss(tower.loss, (*path, "loss"))
        return tower.model_copy(update=update)

    def _loss(self, loss: LossConfig, path: KeyPath) -> LossConfig:
        params = self.params("local_loss", loss.kind, loss.params, path)
        return loss if params is None else loss.model_copy(update={"params": _plain(params)})

    def _head(self, head: HeadConfig, path: KeyPath) -> HeadConfig:
        params = self.params("head", head.kind, head.params, path)
        return head if params is None else head.model_copy(update={"params": _plain(params)})

    def _lift(self, tower: TowerConfig, params: Params, path: KeyPath) -> None:
        """Refuses a cut below the tower's first layer."""
        if isinstance(params, TowerParams) and tower.cut_at > params.liftable:
            message = f"found {tower.cut_at}; a {tower.kind} of this size can have at most {params.liftable} layers "
            message += "above its cut"
            self.problems.append(Problem((*path, "cut_at"), message))

    def _fit(self, config: Config, tower: TowerConfig, params: Params, path: KeyPath) -> None:
        """Asks the tower's own rules about the inputs that it would get."""
        rests_on: tuple[KeyPath, ...] = ((*path, "inputs"), ("features",), ("embedding",))
        if not isinstance(params, TowerParams) or not all(map(self._validated.trusts, rests_on)):
            return
        dense = _chosen(tower.inputs.dense, [feature.name for feature in config.features.dense])
        sparse = _chosen(tower.inputs.sparse, [feature.name for feature in config.features.sparse])
        if not all(name in self._output_dims for name in tower.inputs.towers):
            return  # the tower that it reads has a problem, or a rule of its own reports the name
        dense_dim = len(dense) + sum(self._output_dims[name] for name in tower.inputs.towers)
        if not dense_dim and not sparse:
            return  # a rule of its own reports a tower that reads nothing
        dims = [config.features.sparse[at].embedding_dim or config.embedding.dim for at in sparse]
        problems = params.problems(dense_dim, dims)
        if not problems:
            self._output_dims[tower.name] = params.output_dim(dense_dim, dims)
        self.problems += [Problem(path, problem) for problem in problems]


def _plain(params: Params) -> dict[str, Any]:
    """Plain data, equal to what reading it again gives."""
    return params.model_dump(mode="json")


def _chosen(inputs: bool | Sequence[str], names: Sequence[str]) -> list[int]:
    """Positions of the features that a tower reads, in feature order."""
    if isinstance(inputs, bool):
        return list(range(len(names))) if inputs else []
    return [position for position, name in enumerate(names) if name in inputs]

"""From the configuration to loaders: open the source, fit the features, encode the rows, cut the splits."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from data.errors import DataError
from data.features.columns import column_of, columns_of, features_of
from data.features.encoding import BoolArray, IntArray
from data.features.fit import FeaturesFit
from data.features.fitted import Features
from data.loader import Loader
from data.registry import WITHOUT_FILES, SourceCatalog, open_source
from data.shuffle import held_out
from data.sources.source import Source, Split
from data.table import EncodedTable, concatenate
from erase_rec.config.schema import Config, DataConfig

NOTABLE_SHARE = 0.01
"""Unseen and missing shares from here on are worth a remark."""


@runtime_checkable
class KnowsBayesNE(Protocol):
    """A source whose rows come from a known distribution."""

    def bayes_ne(self) -> float:
        """NE of the true probabilities on the source's rows: the best there is."""
        ...


@dataclass(frozen=True)
class Datasets:
    """The splits of a run on this rank.

    Attributes:
        train: training rows.
        eval: held-out rows, in file order; None where the configuration names none.
        features: as fitted on the training rows.
        fingerprint: hex SHA-256 of the sources' content and of all settings that decide what becomes of it.
        unseen_share_of: share of unseen values among each sparse feature's held-out values; nan where there are none.
            With ``hash`` a lower bound.
        unseen_share: the same over all sparse features.
        missing_share: share of missing cells (and empty bags) of each feature, before ``fill``, in the training
            source's rows, whether or not they are held out.
        num_clipped: dense values of the same rows that were clipped to float32's range.
        bayes_ne: NE of the true probabilities on the held-out rows, where they are known.
    """

    train: Loader
    eval: Loader | None
    features: Features
    fingerprint: str
    unseen_share_of: dict[str, float]
    unseen_share: float
    missing_share: dict[str, float]
    num_clipped: int
    bayes_ne: float | None

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each sparse feature's embedding table, by feature name."""
        return self.features.table_rows

    def remarks(self) -> list[str]:
        """What a user should know of the data, a line each."""
        lines = unseen_remarks(self.unseen_share_of, self.unseen_share)
        if any(share >= NOTABLE_SHARE for share in self.missing_share.values()):
            lines.append(f"missing cells: {_most(self.missing_share)}")
        if self.train.base_rate in (0.0, 1.0):
            lines.append(
                f"warning: every training label is {self.train.base_rate:.0f}, so NE and AUC are undefined; "
                "check data.label"
            )
        if self.train.dropped_rows:
            lines.append(
                f"{self.train.dropped_rows} of the training rows, others in each epoch, are left out: every rank takes "
                "as many rows in every step"
            )
        if self.num_clipped:
            lines.append(f"{self.num_clipped:,} dense values were clipped to float32's finite range")
        return lines


def build_datasets(
    config: Config, *, features: Features | None = None, rank: int = 0, world_size: int = 1, pin: bool = False
) -> Datasets:
    """Reads all rows and makes the loaders of ``rank``.

    Args:
        config: checked, defaults filled in.
        features: already fitted, for a run that goes on; None: fit them on the training rows.
        rank: this process's rank.
        world_size: number of ranks.
        pin: batches in page-locked memory.

    Raises:
        DataError: the data cannot be read as configured, or there is nothing to train on.
    """
    share = _Share(rank, world_size, pin)
    source = _open(config.data, config.seed, "train")
    if features is None:
        features = _fit(config, source)
    elif features.config != config.features:
        raise DataError("features: not those that were fitted; keep the features of the run, or start a new run")
    table = _encode(config, source, features)
    reserved = _reserved(config, 0, table.num_rows)
    if reserved.all():
        raise DataError(
            f"data.train: no rows to train on ({table.num_rows} rows read, {int(reserved.sum())} of them held out); "
            "give more rows or a smaller data.eval_fraction"
        )
    if (num_train := int((~reserved).sum())) < world_size:
        raise DataError(f"data.train: {num_train} rows cannot be shared by {world_size} ranks; start fewer ranks")
    eval_source = _eval_source(config)
    if eval_source is not None:
        evaluation = _eval_loader(config, _encode(config, eval_source, features), None, share)
    elif config.data.eval_fraction is not None:
        evaluation = _eval_loader(config, table, np.flatnonzero(reserved), share)
    else:
        evaluation = None
    unseen_share_of, unseen_share = unseen_shares(config, evaluation)
    names = [feature.name for feature in features_of(config.features)]
    return Datasets(
        train=_train_loader(config, table, np.flatnonzero(~reserved), share),
        eval=evaluation,
        features=features,
        fingerprint=_fingerprint(config, source, eval_source),
        unseen_share_of=unseen_share_of,
        unseen_share=unseen_share,
        missing_share=_shares(names, table.num_missing, table.count_cells()),
        num_clipped=int(table.num_clipped.sum()),
        bayes_ne=eval_source.bayes_ne() if isinstance(eval_source, KnowsBayesNE) else None,
    )


def build_eval(config: Config, features: Features, *, rank: int = 0, world_size: int = 1, pin: bool = False) -> Loader:
    """Reads held-out rows, of ``data.eval`` or the run's own, for features that are already fitted.

    Raises:
        DataError: the data cannot be read as configured, or the configuration names no rows to evaluate.
    """
    share = _Share(rank, world_size, pin)
    source = _eval_source(config)
    if source is not None:
        return _eval_loader(config, _encode(config, source, features), None, share)
    if config.data.eval_fraction is None:
        raise DataError("data.eval: the run held out no rows; name the files to evaluate: data.eval=PATH")
    table = _encode(config, _open(config.data, config.seed, "train"), features)
    return _eval_loader(config, table, np.flatnonzero(_reserved(config, 0, table.num_rows)), share)


def unseen_shares(config: Config, evaluation: Loader | None) -> tuple[dict[str, float], float]:
    """Share of unseen values, by sparse feature and over all; nan where there are no values.

    Args:
        config: checked, defaults filled in.
        evaluation: held-out rows; None: there are none.
    """
    if evaluation is None:
        return {}, math.nan
    unseen, total = evaluation.count_unseen()
    names = [feature.name for feature in config.features.sparse]
    return _shares(names, unseen, total), _shares(["all"], unseen.sum(keepdims=True), total.sum(keepdims=True))["all"]


def unseen_remarks(share_of: dict[str, float], share: float) -> list[str]:
    """What a user should know of the shares of :func:`unseen_shares`: one line, or none where they are small."""
    if not share >= NOTABLE_SHARE:  # nan is not notable
        return []
    return [f"{share:.1%} of the held-out categorical values are unseen: {_most(share_of)}"]


def load_features(folder: Path) -> Features:
    """The fitted features of a run; see :meth:`data.features.fitted.Features.load`."""
    return Features.load(folder)


@dataclass(frozen=True)
class _Share:
    """What of the batches this process makes, and where."""

    rank: int
    world_size: int
    pin: bool


def _open(data: DataConfig, seed: int, split: Split) -> Source:
    return open_source(data.kind, data.train if split == "train" else data.eval, data.params, seed=seed, split=split)


def _eval_source(config: Config) -> Source | None:
    """The source of held-out rows that are no part of the training source."""
    own = config.data.kind in WITHOUT_FILES and config.data.eval_fraction is None
    return _open(config.data, config.seed, "eval") if config.data.eval or own else None


def _reserved(config: Config, first_row: int, num_rows: int) -> BoolArray:
    """Which rows of the training source are held out, bool [num_rows]."""
    if config.data.eval_fraction is None:
        return np.zeros(num_rows, dtype=np.bool_)
    return held_out(first_row, num_rows, seed=config.seed, fraction=config.data.eval_fraction)


def _fit(config: Config, source: Source) -> Features:
    fit = FeaturesFit(config.features)
    first_row = 0
    for block in source.blocks(fit.columns) if fit.columns else ():
        num_rows = block.columns.num_rows
        fit.add(block, ~_reserved(config, first_row, num_rows))
        first_row += num_rows
    return fit.finish()


def _encode(config: Config, source: Source, features: Features) -> EncodedTable:
    label = _label_column(config, source)
    columns = list(dict.fromkeys([label, *columns_of(*features_of(features.config))]))
    blocks = (features.encode(block, label, config.data.label) for block in source.blocks(columns))
    return concatenate([features.empty(), *blocks])


def _label_column(config: Config, source: Source) -> str:
    label = source.label_column if config.data.label.column is None else config.data.label.column
    if label is None:
        raise DataError(
            f"data.label.column: kind {config.data.kind!r} has no label column of its own; name one of "
            f"{', '.join(map(repr, source.columns()))}"
        )
    for feature in features_of(config.features):
        if column_of(feature) == label:
            raise DataError(
                f"features: {feature.name!r} reads {label!r}, which is the label; take it out of the features, "
                "or name another data.label.column"
            )
    return label


def _train_loader(config: Config, table: EncodedTable, rows: IntArray, share: _Share) -> Loader:
    return Loader(
        table,
        rows,
        local_batch_size=config.train.local_batch_size,
        shuffle_seed=config.seed if config.data.shuffle else None,
        workers=config.data.workers,
        rank=share.rank,
        world_size=share.world_size,
        equal=True,
        pin=share.pin,
    )


def _eval_loader(config: Config, table: EncodedTable, rows: IntArray | None, share: _Share) -> Loader:
    return Loader(
        table,
        np.arange(table.num_rows) if rows is None else rows,
        local_batch_size=config.eval.local_batch_size,
        workers=config.data.workers,
        rank=share.rank,
        world_size=share.world_size,
        pin=share.pin,
    )


def _fingerprint(config: Config, source: Source, eval_source: Source | None) -> str:
    """Two runs with the same one train and evaluate on the same encoded rows."""
    data = config.data
    params = SourceCatalog().params_model("source", data.kind)
    decisive = {
        "train": source.fingerprint(),
        "eval": None if eval_source is None else eval_source.fingerprint(),
        "eval_fraction": data.eval_fraction,
        "seed": config.seed if data.eval_fraction is not None else None,
        "kind": data.kind,
        "params": params.model_validate(data.params).model_dump(mode="json"),
        "label": data.label.model_dump(mode="json"),
        "features": config.features.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _shares(names: list[str], part: IntArray, whole: IntArray) -> dict[str, float]:
    pairs = zip(names, part.tolist(), whole.tolist(), strict=True)
    return {name: some / every if every else math.nan for name, some, every in pairs}


def _most(shares: dict[str, float], count: int = 5) -> str:
    """The largest shares first."""
    largest = sorted((name for name in shares if shares[name] > 0), key=lambda name: -shares[name])
    shown = ", ".join(f"{name} {shares[name]:.1%}" for name in largest[:count])
    return shown + (f" and {len(largest) - count} more" if len(largest) > count else "")

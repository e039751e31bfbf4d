"""From the configuration to loaders: rows kept in memory, streamed from their files, or read from a prepared folder."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from data.block import BlockStore
from data.errors import DataError
from data.expected import check_expected
from data.features.columns import features_of
from data.features.encoding import IntArray
from data.features.fitted import Features
from data.fingerprint import fingerprint, holds_out
from data.loader import Loader
from data.prepared.store import Prepared, open_prepared
from data.quarantine import FILE, write_quarantine
from data.reading import open_eval, open_train
from data.sources.source import Source
from data.store import UnseenValues
from data.unprepared import BadRowsFound, HeldOutRows, read_held_out, read_unprepared
from erase_rec.config.schema import Config

NOTABLE_SHARE = 0.01
"""Unseen and missing shares from here on are worth a remark."""
THREADS_ON_CUDA = 4
"""With as many an H200 waits for 2 % of steps of 1 ms, with 2 for 3 %."""


@runtime_checkable
class KnowsBayesNE(Protocol):
    """A source whose rows come from a known distribution."""

    def bayes_ne(self) -> float:
        """NE of the true probabilities on the source's rows: the best there is."""
        ...


@dataclass(frozen=True)
class Share:
    """What of the batches this process makes, and where.

    Attributes:
        rank: this process's rank.
        world_size: number of ranks.
        pin: batches in page-locked memory.
    """

    rank: int = 0
    world_size: int = 1
    pin: bool = False


@dataclass(frozen=True)
class HeldOut:
    """Rows to evaluate on this rank.

    Attributes:
        loader: in file order.
        names: of the sparse features.
        values: how many of their values are unseen; with ``hash`` a lower bound. Where rows are streamed it is known
            once they were read.
        bad_rows: rows that could not be read.
    """

    loader: Loader
    names: Sequence[str]
    values: UnseenValues
    bad_rows: BadRowsFound

    @property
    def unseen_share_of(self) -> dict[str, float]:
        """Share of unseen values among those of each sparse feature; nan where there are none."""
        return _shares(self.names, self.values.unseen, self.values.values)

    @property
    def unseen_share(self) -> float:
        """The same over all sparse features."""
        unseen, values = int(self.values.unseen.sum()), int(self.values.values.sum())
        return unseen / values if values else math.nan

    def unseen_remarks(self) -> list[str]:
        """One line, or none where the shares are small."""
        if not self.unseen_share >= NOTABLE_SHARE:  # nan is not notable
            return []
        most = _most(self.unseen_share_of)
        return [f"{self.unseen_share:.1%} of the held-out categorical values are unseen: {most}"]


@dataclass(frozen=True)
class Datasets:
    """The splits of a run on this rank.

    Attributes:
        train: training rows.
        held_out: held-out rows; None where the configuration names none.
        features: as fitted on the training rows.
        fingerprint: hex SHA-256 of the sources' content and of all settings that decide what becomes of it.
        missing_share: share of missing cells (and empty bags) of each feature, before ``fill``, in the training
            source's rows, whether or not they are held out.
        num_clipped: dense values of the same rows that were clipped to float32's range.
        bad_rows: rows of all sources that could not be read and were left out.
        bayes_ne: NE of the true probabilities on the held-out rows, where they are known.
        origin: where the rows of a batch come from, for people.
        bad_rows_kept: where bad rows are to be found, for people.
        notes: what a user should know besides.
    """

    train: Loader
    held_out: HeldOut | None
    features: Features
    fingerprint: str
    missing_share: dict[str, float]
    num_clipped: int
    bad_rows: BadRowsFound
    bayes_ne: float | None
    origin: str
    bad_rows_kept: str
    notes: Sequence[str]

    @property
    def eval(self) -> Loader | None:
        """Held-out rows, in file order."""
        return None if self.held_out is None else self.held_out.loader

    @property
    def unseen_share_of(self) -> dict[str, float]:
        """See :attr:`HeldOut.unseen_share_of`; empty without held-out rows."""
        return {} if self.held_out is None else self.held_out.unseen_share_of

    @property
    def unseen_share(self) -> float:
        """See :attr:`HeldOut.unseen_share`; nan without held-out rows."""
        return math.nan if self.held_out is None else self.held_out.unseen_share

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each sparse feature's embedding table, by feature name."""
        return self.features.table_rows

    def write_quarantine(self, folder: Path) -> None:
        """Writes the bad rows that are to be kept, if there are any, into a run's folder."""
        if self.bad_rows.rows:
            write_quarantine(folder / FILE, self.bad_rows.rows)

    def remarks(self) -> list[str]:
        """What a user should know of the data, a line each."""
        lines = [] if self.held_out is None else self.held_out.unseen_remarks()
        if any(share >= NOTABLE_SHARE for share in self.missing_share.values()):
            lines.append(f"missing cells: {_most(self.missing_share)}")
        if self.train.base_rate in (0.0, 1.0):
            lines.append(
                f"warning: every training label is {self.train.base_rate:.0f}, so NE and AUC are undefined; "
                "check data.label"
            )
        if dropped := self.train.dropped_rows():
            lines.append(
                f"{dropped} of the training rows, others in each epoch, are left out: every rank takes as many rows in "
                "every step"
            )
        if self.num_clipped:
            lines.append(f"{self.num_clipped:,} dense values were clipped to float32's finite range")
        return [*lines, *bad_row_remarks(self.bad_rows, self.bad_rows_kept), *self.notes]


def build_datasets(
    config: Config,
    *,
    features: Features | None = None,
    rank: int = 0,
    world_size: int = 1,
    pin: bool = False,
    train_source: Source | None = None,
    eval_source: Source | None = None,
) -> Datasets:
    """Reads all rows, or opens the prepared folder, and makes the loaders of ``rank``.

    Args:
        config: checked, defaults filled in.
        features: already fitted, for a run that goes on; None: fit them on the training rows.
        rank: this process's rank.
        world_size: number of ranks.
        pin: batches in page-locked memory.
        train_source: training rows; None: what the configuration names.
        eval_source: held-out rows; None: what the configuration names beside ``train_source``.

    Raises:
        DataError: the data cannot be read as configured, there is nothing to train on, or it is not what
            ``data.expected`` says.
    """
    share = Share(rank, world_size, pin)
    if features is not None and features.config != config.features:
        raise DataError("features: not those that were fitted; keep the features of the run, or start a new run")
    if config.data.prepared is not None:
        assert train_source is None, "prepared rows come from their folder"
        datasets = _prepared(config, open_prepared(Path(config.data.prepared), config), share)
    else:
        if train_source is None:
            train_source, eval_source = open_train(config), open_eval(config)
        datasets = _unprepared(config, train_source, eval_source, features, share)
    check_expected(config.data.expected, datasets.train, datasets.eval)
    return datasets


def build_eval(
    config: Config,
    features: Features,
    *,
    rank: int = 0,
    world_size: int = 1,
    pin: bool = False,
    train_source: Source | None = None,
    eval_source: Source | None = None,
) -> HeldOut:
    """Reads held-out rows, of ``data.eval`` or the run's own, for features that are already fitted.

    Args:
        config: checked, defaults filled in.
        features: of the run.
        rank: this process's rank.
        world_size: number of ranks.
        pin: batches in page-locked memory.
        train_source: rows of which the configuration holds some out; None: those that it names.
        eval_source: the rows; None: what the configuration names.

    Raises:
        DataError: the data cannot be read as configured, or the configuration names no rows to evaluate.
    """
    share = Share(rank, world_size, pin)
    if config.data.prepared is not None:
        held_out = _held_out(config, _of_folder(open_prepared(Path(config.data.prepared), config)), share)
    elif (source := eval_source or (open_eval(config) if train_source is None else None)) is not None:
        held_out = _held_out(config, read_held_out(config, None, source, features), share)
    elif holds_out(config.data):
        held_out = _held_out(config, read_held_out(config, train_source or open_train(config), None, features), share)
    else:
        held_out = None
    if held_out is None:
        raise DataError("data.eval: the run held out no rows; name the files to evaluate: data.eval=PATH")
    return held_out


def bad_row_remarks(bad: BadRowsFound, kept: str = "") -> list[str]:
    """One line, or none without bad rows.

    Args:
        bad: what could not be read.
        kept: where the rows are to be found.
    """
    if not bad.count:
        return []
    reasons = "; ".join(f"{count:,} x {reason}" for reason, count in list(bad.reasons.items())[:3])
    more = ", and other reasons" if len(bad.reasons) > 3 else ""
    return [f"{bad.count:,} rows could not be read and were left out{kept and f' ({kept})'}: {reasons}{more}"]


def load_features(folder: Path) -> Features:
    """The fitted features of a run; see :meth:`data.features.fitted.Features.load`."""
    return Features.load(folder)


def _unprepared(
    config: Config, train: Source, evaluation: Source | None, features: Features | None, share: Share
) -> Datasets:
    found = read_unprepared(config, train, evaluation, features)
    _refuse_nothing_to_train_on(found.train, found.num_rows, share.world_size)
    names = [feature.name for feature in features_of(config.features)]
    streamed = config.data.reading == "stream"
    return Datasets(
        train=_train_loader(config, found.train, share),
        held_out=_held_out(config, found.eval, share),
        features=found.features,
        fingerprint=fingerprint(config, train.fingerprint(), None if evaluation is None else evaluation.fingerprint()),
        missing_share=_shares(names, found.counts.missing, found.counts.cells),
        num_clipped=int(found.counts.clipped.sum()),
        bad_rows=found.bad_rows,
        bayes_ne=evaluation.bayes_ne() if isinstance(evaluation, KnowsBayesNE) else None,
        origin="read and encoded anew in each epoch" if streamed else "kept in memory",
        bad_rows_kept=f"{FILE} in the run folder holds them" if config.data.bad_rows == "quarantine" else "",
        notes=[*_sampling_remarks(config, found.num_left_out), *found.remarks],
    )


def _prepared(config: Config, found: Prepared, share: Share) -> Datasets:
    folder = Path(str(config.data.prepared))
    _refuse_nothing_to_train_on(found.train, found.manifest.rows_read - found.bad_rows, share.world_size)
    names = [feature.name for feature in features_of(config.features)]
    quarantined = found.manifest.bad_rows.policy == "quarantine"
    return Datasets(
        train=_train_loader(config, found.train, share),
        held_out=_held_out(config, _of_folder(found), share),
        features=found.features,
        fingerprint=found.fingerprint,
        missing_share=_shares(names, found.missing, found.cells),
        num_clipped=found.num_clipped,
        bad_rows=_bad_rows_of(found),
        bayes_ne=None,
        origin=f"read from the prepared folder {folder}",
        bad_rows_kept=f"{folder / FILE} holds them" if quarantined else "",
        notes=_sampling_remarks(config, found.manifest.num_left_out),
    )


def _of_folder(found: Prepared) -> HeldOutRows | None:
    if found.eval is None:
        return None
    values = UnseenValues(len(found.unseen))
    values.unseen, values.values = found.unseen, found.values
    return HeldOutRows(found.eval, values, _bad_rows_of(found))


def _bad_rows_of(found: Prepared) -> BadRowsFound:
    return BadRowsFound(found.bad_rows, found.manifest.bad_rows.reasons, [])


def _refuse_nothing_to_train_on(store: BlockStore, num_rows: int, world_size: int) -> None:
    num_train = int(store.block_rows.sum())
    if not num_train:
        raise DataError(
            f"data.train: no rows to train on ({num_rows} rows read, all of them held out or left out); "
            "give more rows, or hold out fewer (data.eval_fraction, data.split, data.negative_sampling_rate)"
        )
    if num_train < world_size:
        raise DataError(f"data.train: {num_train} rows cannot be shared by {world_size} ranks; start fewer ranks")


def loader_threads(config: Config, *, on_cuda: bool) -> int:
    """``data.workers``, or what is right where it is left out."""
    if config.data.workers is not None:
        return config.data.workers
    return max(1, min(THREADS_ON_CUDA, len(os.sched_getaffinity(0)) - 1)) if on_cuda else 0


def _train_loader(config: Config, store: BlockStore, share: Share) -> Loader:
    return Loader(
        store,
        local_batch_size=config.train.local_batch_size,
        shuffle_seed=config.seed if config.data.shuffle else None,
        window_rows=config.data.shuffle_window,
        workers=loader_threads(config, on_cuda=share.pin),
        rank=share.rank,
        world_size=share.world_size,
        equal=True,
        pin=share.pin,
    )


def _held_out(config: Config, rows: HeldOutRows | None, share: Share) -> HeldOut | None:
    if rows is None:
        return None
    loader = Loader(
        rows.store,
        local_batch_size=config.eval.local_batch_size,
        workers=loader_threads(config, on_cuda=share.pin),
        rank=share.rank,
        world_size=share.world_size,
        pin=share.pin,
    )
    return HeldOut(loader, [feature.name for feature in config.features.sparse], rows.unseen, rows.bad_rows)


def _sampling_remarks(config: Config, num_left_out: int) -> list[str]:
    """What ``data.negative_sampling_rate`` does, in one line; none without it."""
    rate = config.data.negative_sampling_rate
    if rate is None:
        return []
    who = "the files hold" if config.data.negatives_sampled else f"{num_left_out:,} rows were left out to train on"
    return [f"{who} {rate:g} of the negative rows; logits of evaluation and predictions are corrected by log({rate:g})"]


def _shares(names: Sequence[str], part: IntArray, whole: IntArray) -> dict[str, float]:
    pairs = zip(names, part.tolist(), whole.tolist(), strict=True)
    return {name: some / every if every else math.nan for name, some, every in pairs}


def _most(shares: dict[str, float], count: int = 5) -> str:
    """The largest shares first."""
    largest = sorted((name for name in shares if shares[name] > 0), key=lambda name: -shares[name])
    shown = ", ".join(f"{name} {shares[name]:.1%}" for name in largest[:count])
    return shown + (f" and {len(largest) - count} more" if len(largest) > count else "")

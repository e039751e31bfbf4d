"""Predictions of a trained run on rows without labels, from Python: ``Predictor.load(folder).predict(frame)``.

Rows go the way of training: the same readers, transforms, vocabularies and hashes, and the checkpoint's weights. They
are read chunk by chunk and scored as they come, so memory does not grow with the input. The label is never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from data.ahead import in_order
from data.bad_rows import BadRow, BadRows, Policy, refuse_too_many
from data.block import EncodedBlock
from data.dataset import load_features
from data.features.columns import columns_of, features_of
from data.features.encoding import IntArray
from data.features.fitted import Features
from data.features.raw import RawRows, concatenate
from data.features.read import read_rows
from data.frames import FrameSource
from data.loader import Loader
from data.quarantine import count_reasons
from data.sources.source import Block, Chunk, Source
from data.store import MemoryStore, UnseenValues
from erase_rec.api.assembly import ContentCatalog, Machine, restored_settings, scorer, trained_model
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config, LabelConfig
from erase_rec.errors import UserError
from erase_rec.run_folder import RunFolder
from models.ctr_model import CTRModel

WRITTEN = ("row_id", "prediction", "logit")
"""Columns of a result besides those that are carried through."""

_LABEL = "\0label"
"""Stands for the label's column, which readers ask for; no file can have a column of that name."""


@dataclass(frozen=True)
class Predictor:
    """A trained model with its transforms.

    Attributes:
        config: the run's.
        features: as fitted on the run's training rows.
        model: in evaluation mode, with the checkpoint's weights.
        machine: where it computes.
    """

    config: Config
    features: Features
    model: CTRModel
    machine: Machine

    @classmethod
    def load(cls, checkpoint: Path | str, *, device: Literal["auto", "cpu", "cuda"] = "auto") -> Self:
        """Loads a checkpoint, or of a run folder the best one (without evaluations: the newest).

        Raises:
            UserError: there is no whole checkpoint, it does not fit its run, or the device is not there.
        """
        path = Path(checkpoint)
        folder = RunFolder.of_checkpoint(path)
        overrides = [f"train.device={device}"]
        config = load_config(str(folder.config), overrides, catalog=ContentCatalog()).config
        features = load_features(folder.features)
        with restored_settings(on_cuda=False):  # nothing is drawn at random
            machine = Machine.prepare(config)
            model = trained_model(config, features.table_rows, folder.checkpoint(path), machine)
        return cls(config, features, model, machine)

    def predict(
        self,
        frame: pd.DataFrame,
        *,
        keep: Sequence[str] = (),
        batch_size: int | None = None,
        bad_rows: Policy = "error",
    ) -> pd.DataFrame:
        """Scores the rows of a DataFrame; its columns go by name, as in the run's files.

        Args:
            frame: rows with the columns that the features read; others, such as a label, are not looked at.
            keep: columns that the result carries along.
            batch_size: rows a forward pass; None: ``eval.local_batch_size``. The predictions do not depend on it.
            bad_rows: what becomes of rows that cannot be read: an error, or (``skip``) they are left out.

        Returns:
            The kept columns, ``prediction`` (probability of a click, float64) and ``logit``, in the frame's order and
            with its index.

        Raises:
            UserError: a column is not there or of a type that cannot be read, or a row cannot be read.
        """
        if bad_rows == "quarantine":
            raise UserError("bad_rows: quarantine needs files; use error or skip for a DataFrame")
        scoring = Scoring(self, FrameSource(frame, split="eval"), keep=keep, batch_size=batch_size, bad_rows=bad_rows)
        table = pa.concat_tables([scoring.empty(), *scoring.tables()], promote_options="permissive")
        result: pd.DataFrame = table.to_pandas()
        row_ids = result.pop("row_id").to_numpy(dtype=np.int64)
        return result.set_axis(frame.index[row_ids])


class Scoring:
    """One pass of a model over a source. Everything but the rows adds up while :meth:`tables` is iterated.

    Attributes:
        num_rows: rows scored so far.
        bad: rows that could not be read, so far.
    """

    def __init__(
        self,
        predictor: Predictor,
        source: Source,
        *,
        keep: Sequence[str] = (),
        batch_size: int | None = None,
        bad_rows: Policy | None = None,
        max_bad_share: float | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            predictor: model and transforms.
            source: rows; a label's column may be missing.
            keep: columns that are carried along.
            batch_size: rows a forward pass; None: ``eval.local_batch_size``.
            bad_rows: what becomes of rows that cannot be read; None: as in the run.
            max_bad_share: more of them than this share (and than 100) end the reading; None: as in the run.

        Raises:
            UserError: a kept column has the name of one that is written, or a number is out of its range.
        """
        if isinstance(keep, str):
            raise UserError(f"keep: found the text {keep!r}, expected a list of columns")
        if batch_size is not None and batch_size < 1:
            raise UserError(f"batch_size: found {batch_size}, expected at least 1")
        if bad_rows not in (None, *get_args(Policy)):
            raise UserError(f"bad_rows: found {bad_rows!r}, expected one of {', '.join(get_args(Policy))}")
        for name in keep:
            if name in WRITTEN:
                raise UserError(f"--keep: {name!r} is a column that predictions write; rename it in the input")
        self._predictor, self._source = predictor, source
        self._keep = list(dict.fromkeys(keep))
        self._batch_size = predictor.config.eval.local_batch_size if batch_size is None else batch_size
        self._policy: Policy = bad_rows or predictor.config.data.bad_rows
        self._max_bad_share = predictor.config.data.max_bad_share if max_bad_share is None else max_bad_share
        self._unseen = UnseenValues(len(predictor.config.features.sparse))
        self.num_rows = 0
        self.bad: list[BadRow] = []

    def empty(self) -> pa.Table:
        """A result without rows; the types of kept columns are open."""
        kept = [(name, pa.null()) for name in self._keep]
        return pa.schema(
            [("row_id", pa.int64()), *kept, ("prediction", pa.float64()), ("logit", pa.float32())]
        ).empty_table()

    def tables(self) -> Iterator[pa.Table]:
        """The readable rows in the order of the input, a table a chunk.

        ``row_id`` is a row's position among all rows of the input, bad ones counted, from 0; the kept columns follow,
        then ``prediction`` (float64) and ``logit``.

        Raises:
            DataError: the source cannot be read, a row cannot under the policy ``error``, or too many cannot.
        """
        start = 0  # rows of the input before the chunk
        workers = self._predictor.config.data.workers or 0
        for number, chunk in enumerate(in_order(self._read, self._source.chunks(), workers, "predict")):
            self.bad += chunk.bad
            if chunk.rows is not None and chunk.block is not None:
                self._unseen.add(number, chunk.block)
                self.num_rows += chunk.rows.num_rows
                yield self._table(chunk.block, chunk.rows, start + chunk.positions())
            start += chunk.num_rows
            refuse_too_many(len(self.bad), start, self._max_bad_share)
        self._predictor.model.embeddings.verify()

    def remarks(self) -> list[str]:
        """What a user should know of the rows, a line each."""
        lines = []
        unseen, values = int(self._unseen.unseen.sum()), int(self._unseen.values.sum())
        if values and unseen / values >= 0.01:
            shares = self._unseen.unseen / np.maximum(self._unseen.values, 1)
            names = [feature.name for feature in self._predictor.config.features.sparse]
            most = ", ".join(f"{names[i]} {shares[i]:.1%}" for i in np.argsort(-shares)[:5] if shares[i] > 0)
            lines.append(f"{unseen / values:.1%} of the categorical values are unseen in training: {most}")
        if self.bad:
            reasons = count_reasons(self.bad).most_common(3)
            shown = "; ".join(f"{count:,} x {reason}" for reason, count in reasons)
            lines.append(f"{len(self.bad):,} rows could not be read and have no prediction: {shown}")
        return lines

    def _read(self, chunk: Chunk) -> _ReadChunk:
        features = self._predictor.features
        columns = list(dict.fromkeys([*columns_of(*features_of(features.config)), *self._keep]))
        bad = BadRows(self._policy)
        parts = [
            read_rows(features.config, _LABEL, LabelConfig(), _with_label(block), bad, self._keep)
            for block in chunk.blocks(columns, bad)
        ]
        parts = [part for part in parts if part.num_rows]
        if not parts:
            return _ReadChunk(None, None, bad.rows)
        rows = concatenate(parts)
        return _ReadChunk(rows, features.encode(rows), bad.rows)

    def _table(self, block: EncodedBlock, rows: RawRows, row_ids: IntArray) -> pa.Table:
        loader = Loader(MemoryStore([block]), local_batch_size=self._batch_size, pin=self._predictor.machine.pins)
        score = scorer(self._predictor.model, self._predictor.machine)
        with restored_settings(on_cuda=False), torch.no_grad():
            Machine.prepare(self._predictor.config)
            logits = [score(batch).logit.cpu() for batch in loader.batches(0)]  # host synchronisation: one a batch
        logit = torch.cat(logits)
        columns: dict[str, Any] = {"row_id": row_ids}
        columns |= {name: _plain(rows.extra[name]) for name in self._keep}
        columns |= {"prediction": logit.double().sigmoid().numpy(), "logit": logit.numpy()}
        return pa.table(columns)


@dataclass(frozen=True)
class _ReadChunk:
    """A chunk of input: its readable rows, raw and encoded (None: there are none), and the others."""

    rows: RawRows | None
    block: EncodedBlock | None
    bad: list[BadRow]

    @property
    def num_rows(self) -> int:
        """All rows."""
        return len(self.bad) + (0 if self.rows is None else self.rows.num_rows)

    def positions(self) -> IntArray:
        """Where the readable rows stand among all rows of the chunk, which are consecutive; int64 [R]."""
        assert self.rows is not None
        numbers = self.rows.rows.numbers
        return numbers - min([int(numbers[0]), *(row.number for row in self.bad)])


def _with_label(block: Block) -> Block:
    """The block with a label for each row, which nobody looks at: reading rows gives every row one."""
    label = pa.array(np.zeros(block.num_rows, dtype=np.uint8))
    return replace(block, columns=block.columns.append_column(_LABEL, label))


def _plain(column: pa.Array) -> pa.Array:
    """Values without their storage, which may differ from file to file."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.large_string()) if pa.types.is_string(column.type) else column

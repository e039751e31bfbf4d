"""Evaluation on held-out rows: collects every row's logits, then computes each metric once over all of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.functional import pad

from erase_rec.batch import Batch, Scores
from erase_rec.distributed.world import World
from erase_rec.protocols import EvalResult
from eval.metrics import ClickSums, base_rate, click_sums, normalized_entropy
from eval.registry import ROW_METRICS, SUM_METRICS
from eval.tower_health import tower_health

logger = logging.getLogger(__name__)

TOWER_METRICS = ("ne", "auc")
FIXED_METRICS = ("ne", "auc", "logloss", "calibration", "base_rate")
"""Metrics with a field of their own in :class:`erase_rec.protocols.EvalResult`."""


@dataclass(frozen=True)
class _Rows:
    """Scored rows on the host."""

    logits: Tensor  # [1 + T, n], the model's and the towers', then T for each of ``parts``
    label: Tensor  # [n]
    row_ids: Tensor  # int64 [n]
    parts: tuple[str, ...] = ()  # what else the scores said: terms, without

    def part(self, name: str, towers: int) -> Tensor | None:
        """One of ``parts``, [T, n]; None where it was not said."""
        if name not in self.parts:
            return None
        start = 1 + towers * (1 + self.parts.index(name))
        return self.logits[start : start + towers]


class PooledEvaluator:
    """Implements :class:`erase_rec.protocols.Evaluator`.

    Rows are kept on the host: 4 bytes a row for each of the model and the towers (8 where logits are float64). The
    first rank computes the metrics over the rows of all ranks, in the order of their ids, so that nothing depends on
    batch size and ranks beyond the logits themselves.
    """

    def __init__(
        self, towers: Sequence[str], world: World, base_rate: Callable[[], float | None] = lambda: None
    ) -> None:
        """Evaluates the model and ``towers``, in this order, on the rows of all ranks of ``world``.

        Args:
            towers: names.
            world: the ranks.
            base_rate: the constant prediction of NE's denominator (``eval.base_rate``), asked for once an evaluation on
                every rank, and the same there; None: the base rate of the rows that are evaluated.
        """
        self._towers = tuple(towers)
        self._world = world
        self._base_rate = base_rate
        self._warned = False

    def evaluate(
        self,
        score: Callable[[Batch], Scores],
        batches: Iterable[Batch],
        keep_scores: bool = False,
    ) -> EvalResult:
        """Scores ``batches`` and pools the rows of all ranks. Synchronises the host once a batch.

        Args:
            score: logits of a batch, which it moves to the model's device itself.
            batches: this rank's held-out rows; none at all on any rank gives 0 rows and nan.
            keep_scores: also return the table of rows on the first rank, see :func:`score_table`.
        """
        rows = self._pool(self._collect(score, batches))
        rate = self._base_rate()
        result = self._world.broadcast_object("evaluation", None if rows is None else self._result(rows, rate))
        assert result is not None
        if keep_scores and rows is not None:
            return replace(result, scores=score_table(rows, self._towers))
        return result

    def _result(self, rows: _Rows, rate: float | None) -> EvalResult:
        values = [_metrics(logit, rows.label, rate) for logit in rows.logits[: 1 + len(self._towers)]]
        model = values[0]
        self._warn_undefined(model["ne"], model["auc"], rows.label)
        health, most_like = tower_health(
            rows.logits[0],
            rows.logits[1 : 1 + len(self._towers)],
            rows.label,
            terms=rows.part("terms", len(self._towers)),
            without=rows.part("without", len(self._towers)),
            rate=rate,
        )
        return EvalResult(
            **{name: model[name] for name in FIXED_METRICS},
            rows=rows.label.numel(),
            towers={
                tower: {name: tower_values[name] for name in TOWER_METRICS} | found
                for tower, tower_values, found in zip(self._towers, values[1:], health, strict=True)
            },
            most_like={
                tower: self._towers[other]
                for tower, other in zip(self._towers, most_like, strict=True)
                if other is not None
            },
            extra={name: value for name, value in model.items() if name not in FIXED_METRICS},
        )

    def _collect(self, score: Callable[[Batch], Scores], batches: Iterable[Batch]) -> _Rows:
        """This rank's rows."""
        logits, labels, row_ids = list[Tensor](), [torch.empty(0)], [torch.empty(0).long()]
        parts: tuple[str, ...] = ()
        for batch in batches:
            scores = score(batch)
            if batch.size == 0:
                continue  # of a step with fewer rows than ranks: tables of the others may need this rank
            said = {"terms": scores.terms, "without": scores.without}
            parts = tuple(name for name, logits_of in said.items() if logits_of)
            chosen = [scores.tower_logits, *(said[name] for name in parts)]
            stacked = torch.stack([scores.logit, *(found[name] for found in chosen for name in self._towers)])
            stacked = stacked if stacked.dtype == torch.float64 else stacked.float()
            logits.append(stacked.detach().cpu())  # host synchronisation: one copy a batch
            labels.append(batch.label.cpu())
            row_ids.append(batch.row_ids)
        if not logits:
            logits = [torch.empty(1 + len(self._towers), 0)]
        return _Rows(torch.cat(logits, dim=1), torch.cat(labels), torch.cat(row_ids), parts)

    def _pool(self, own: _Rows) -> _Rows | None:
        """The rows of all ranks in the order of their ids, on the first rank."""
        world = self._world
        if world.size == 1:
            return own
        # A rank without rows does not know the logits' type, nor what else the scores say.
        said = world.gather_objects("evaluation.rows", (own.label.numel(), own.logits.dtype, own.parts))
        counts, dtypes, parts_of = zip(*said, strict=True)
        told: tuple[str, ...] = max(parts_of, key=len)
        logits = own.logits.double() if torch.float64 in dtypes else own.logits
        if own.parts != told:
            assert logits.shape[1] == 0
            logits = logits.new_empty((1 + len(self._towers) * (1 + len(told)), 0))
        columns = {"logits": logits, "label": own.label, "row_ids": own.row_ids}
        room = max(counts) - own.label.numel()
        joined = []
        for name, column in columns.items():
            parts = world.gather_to_first(f"evaluation.{name}", pad(column, (0, room)))
            if parts is not None:
                joined.append(torch.cat([part[..., :rows] for part, rows in zip(parts, counts, strict=True)], dim=-1))
        if not joined:
            return None
        order = joined[-1].argsort()
        pooled, label, row_ids = (column[..., order] for column in joined)
        return _Rows(pooled, label, row_ids, told)

    def _warn_undefined(self, ne: float, auc: float, label: Tensor) -> None:
        if self._warned or not (math.isnan(ne) or math.isnan(auc)):
            return
        self._warned = True
        logger.warning(
            "eval/ne or eval/auc is undefined (nan), which is said once: %d of %d held-out rows are positive; "
            "both metrics need both classes, and logits that are numbers",
            int(label.sum()),
            label.numel(),
        )


def score_table(rows: _Rows, towers: Sequence[str]) -> pa.Table:
    """Rows as written to ``scores.parquet``, with the names of the towers.

    Returns:
        Columns ``row_id`` (position among the held-out rows, in the order of the files), ``label`` (int8),
        ``prediction`` (float64, so that different float32 logits remain different and rank alike), ``logit``, and
        ``tower_<name>``, the towers' logits.
    """
    columns = {
        "row_id": rows.row_ids,
        "label": rows.label.to(torch.int8),
        "prediction": rows.logits[0].double().sigmoid(),
        "logit": rows.logits[0],
    }
    of_towers = rows.logits[1 : 1 + len(towers)]
    columns |= {f"tower_{name}": logit for name, logit in zip(towers, of_towers, strict=True)}
    return pa.table({name: column.numpy() for name, column in columns.items()})


def _metrics(logit: Tensor, label: Tensor, rate: float | None) -> dict[str, float]:
    sums = ClickSums(*click_sums(logit, label).tolist())
    values = {name: metric(sums) for name, metric in SUM_METRICS.items()}
    values |= {name: metric(logit, label) for name, metric in ROW_METRICS.items()}
    return values | {"ne": normalized_entropy(sums, rate), "ne_base_rate": base_rate(sums) if rate is None else rate}

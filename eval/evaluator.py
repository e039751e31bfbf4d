"""Evaluation on held-out rows: collects every row's logits, then computes each metric once over all of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
import torch
from torch import Tensor

from erase_rec.batch import Batch, Scores
from erase_rec.protocols import EvalResult
from eval.metrics import ClickSums, click_sums
from eval.registry import ROW_METRICS, SUM_METRICS

logger = logging.getLogger(__name__)

TOWER_METRICS = ("ne", "auc")
FIXED_METRICS = ("ne", "auc", "logloss", "calibration", "base_rate")
"""Metrics with a field of their own in :class:`erase_rec.protocols.EvalResult`."""


class PooledEvaluator:
    """Implements :class:`erase_rec.protocols.Evaluator`.

    Rows are kept on the host in the order of the batches: 4 bytes a row for each of the model and the towers (8
    where logits are float64), so nothing depends on the batch size beyond the logits themselves.
    """

    def __init__(self, towers: Sequence[str]) -> None:
        """Evaluates the model and ``towers``, in this order."""
        self._towers = tuple(towers)
        self._warned = False

    def evaluate(
        self,
        score: Callable[[Batch], Scores],
        batches: Iterable[Batch],
        keep_scores: bool = False,
    ) -> EvalResult:
        """Scores ``batches`` and pools all rows. Synchronises the host once a batch.

        Args:
            score: logits of a batch, which it moves to the model's device itself.
            batches: held-out rows; none at all gives 0 rows and nan.
            keep_scores: also return the table of rows, see :func:`score_table`.
        """
        logits, label, row_ids = self._collect(score, batches)
        values = [_metrics(logit, label) for logit in logits]
        model = values[0]
        self._warn_undefined(model["ne"], model["auc"], label)
        return EvalResult(
            **{name: model[name] for name in FIXED_METRICS},
            rows=label.numel(),
            towers={
                tower: {name: tower_values[name] for name in TOWER_METRICS}
                for tower, tower_values in zip(self._towers, values[1:], strict=True)
            },
            extra={name: value for name, value in model.items() if name not in FIXED_METRICS},
            scores=score_table(row_ids, label, logits, self._towers) if keep_scores else None,
        )

    def _collect(self, score: Callable[[Batch], Scores], batches: Iterable[Batch]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [1 + T, n], labels [n] and row ids [n] of all batches, on the host."""
        logits, labels, row_ids = [torch.empty(1 + len(self._towers), 0)], [torch.empty(0)], [torch.empty(0).long()]
        for batch in batches:
            scores = score(batch)
            stacked = torch.stack([scores.logit, *(scores.tower_logits[name] for name in self._towers)])
            stacked = stacked if stacked.dtype == torch.float64 else stacked.float()
            logits.append(stacked.detach().cpu())  # host synchronisation: one copy a batch
            labels.append(batch.label.cpu())
            row_ids.append(batch.row_ids)
        return torch.cat(logits, dim=1), torch.cat(labels), torch.cat(row_ids)

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


def score_table(row_ids: Tensor, label: Tensor, logits: Tensor, towers: Sequence[str]) -> pa.Table:
    """Rows as written to ``scores.parquet``.

    Args:
        row_ids: int64 [n].
        label: [n].
        logits: [1 + T, n], the model's and the towers'.
        towers: names of the T towers.

    Returns:
        Columns ``row_id``, ``label`` (int8), ``prediction`` (float64, so that different float32 logits remain
        different and rank alike), ``logit``, and ``tower_<name>``, the towers' logits.
    """
    columns = {
        "row_id": row_ids,
        "label": label.to(torch.int8),
        "prediction": logits[0].double().sigmoid(),
        "logit": logits[0],
    }
    columns |= {f"tower_{name}": logit for name, logit in zip(towers, logits[1:], strict=True)}
    return pa.table({name: column.numpy() for name, column in columns.items()})


def _metrics(logit: Tensor, label: Tensor) -> dict[str, float]:
    sums = ClickSums(*click_sums(logit, label).tolist())
    values = {name: metric(sums) for name, metric in SUM_METRICS.items()}
    return values | {name: metric(logit, label) for name, metric in ROW_METRICS.items()}

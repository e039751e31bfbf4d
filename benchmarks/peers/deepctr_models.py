"""DeepCTR-Torch: its models and its ``fit``, on encoded rows.

Settings that would hurt it needlessly are not used: L2 terms over whole tables in every step (slow, and weak beside
its summed loss), metrics of every batch, one rate for tables and layers alike, and dense weights that start with a
deviation of 1e-4 (``init_std`` is for embeddings and layers together; :data:`INIT_STD` is not compared with others).
An evaluation within its ``fit`` would leave the model in evaluation mode, without dropout: here ``fit`` ends before.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import absent  # noqa: F401 (stands in for what DeepCTR-Torch imports)
import numpy as np
from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
from deepctr_torch.models import AutoInt, DCNMix, DeepFM, xDeepFM
from optimizers import optimizer_of
from rows import Array, Fields, Part, Setting, Watch

HIDDEN = (128, 64)
INIT_STD = 0.01
PREDICTED_ROWS = 8192
NO_L2 = {"l2_reg_embedding": 0.0, "l2_reg_dnn": 0.0}

MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "DeepFM": (DeepFM, {"l2_reg_linear": 0.0}),
    "DCNMix": (DCNMix, {"l2_reg_linear": 0.0, "l2_reg_cross": 0.0, "cross_num": 2, "low_rank": 32, "num_experts": 4}),
    "xDeepFM": (xDeepFM, {"l2_reg_linear": 0.0, "l2_reg_cin": 0.0, "cin_layer_size": (32, 32)}),
    "AutoInt": (AutoInt, {"att_layer_num": 1, "att_head_num": 2}),
}


class Peer:
    """A model with its trainer."""

    def __init__(self, name: str, fields: Fields, setting: Setting) -> None:
        """Builds ``name`` of :data:`MODELS`, with an optimizer of their own for tables."""
        make, params = MODELS[name]
        columns = [
            *(DenseFeat(column) for column in fields.dense),
            *(SparseFeat(column, rows, embedding_dim=fields.dim) for column, rows in fields.tables.items()),
            *(
                VarLenSparseFeat(SparseFeat(column, rows + 1, embedding_dim=fields.dim), longest, combiner="mean")
                for column, (rows, longest) in fields.bags.items()
            ),
        ]
        self.model = make(
            columns,
            columns,
            dnn_hidden_units=HIDDEN,
            dnn_dropout=setting.dropout,
            init_std=INIT_STD,
            seed=setting.seed,
            **NO_L2,
            **params,
        )
        self.model.compile(optimizer_of(self.model, setting), "binary_crossentropy")
        self._batch_size, self._rows_between = fields.batch_size, fields.batch_size * fields.eval_every_steps
        self._order = np.random.default_rng(setting.seed)

    def rows(self, part: Part) -> Part:
        """What :meth:`train` takes."""
        return part

    def train(self, part: Part, epochs: int = 1, watch: Watch | None = None) -> None:
        """Trains on ``part``; judged now and then by ``watch``, for which ``fit`` is called on some rows at a time."""
        for _ in range(epochs if watch is not None else 1):
            order = self._order.permutation(part.num_rows)
            step = self._rows_between if watch is not None else part.num_rows
            for start in range(0, part.num_rows, step):
                self._fit(part.take(order[start : start + step]))
                if watch is not None and watch.stops(self.scores):
                    return

    def _fit(self, part: Part) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it speaks whatever ``verbose`` says
            self.model.fit([matrix(part)], part.label[:, None], batch_size=self._batch_size, epochs=1, verbose=0)

    def scores(self, part: Part) -> Array:
        """Probabilities [R]."""
        found: Array = self.model.predict([matrix(part)], PREDICTED_ROWS)
        return found


def matrix(part: Part) -> Array:
    """All columns side by side as float32, as ``fit`` wants them: it holds table rows exactly up to 16 million."""
    return np.column_stack([part.dense, part.ids, *part.bags.values()]).astype(np.float32)

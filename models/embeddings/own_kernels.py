"""Host's side of :mod:`models.kernels.embedding_rows`: the kernels over tables that lie in one buffer.

Nothing here synchronises the host (``first_outside`` aside) and shapes depend on the batch's shapes alone, so that a
lookup, an order and an update can be captured into a CUDA graph. The learning rate lives on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from erase_rec.kernels import TRITON_INSTALLED
from models.embeddings.layout import Table

KINDS = ("rowwise_adagrad", "adagrad", "sgd")
"""Optimizers that the update kernel knows. Adam stays with FBGEMM."""

_CHUNK = 32
"""Sorted ids that a program of the update takes: a tile of the matrix units, and enough programs at small batches."""
_EDGES_AT_ONCE = 32
"""Chunks whose sums of one row are read together."""
_ROWS_SORTED_ALONE = 4096
"""Up to so many ids, PyTorch sorts a feature in one thread block: 22 us for 26 features of 1024 on an H200, 25 us of
4096, against 48 and 52 us for all of them together; of 16384 it takes 90 against 64 us."""


def own_kernels_apply(device: torch.device, optimizer: SparseOptimizerConfig) -> bool:
    """Whether tables on ``device`` can have these kernels: CUDA with Triton, and an optimizer of ``KINDS``."""
    return device.type == "cuda" and optimizer.kind in KINDS and TRITON_INSTALLED


@dataclass(frozen=True)
class Order:
    """What an update needs of a batch's ids.

    Attributes:
        keys: int32 or int64 [V], rows over all tables, ascending; the number of all rows for ids of no row.
        index: int64 [V], where each key was among the ids.
        by_feature: each feature's ids are ordered by themselves, and ``index`` counts within the feature.
        bags: int32 [V], the bag of each id before the sort; None: id v is bag v.
        scales: float32 [V], what the bag's gradient counts with for each id before the sort; None: 1.
    """

    keys: Tensor
    index: Tensor
    by_feature: bool
    bags: Tensor | None
    scales: Tensor | None


class OwnKernels:
    """Lookup and update of float32 tables, one after the other in one buffer, on one device.

    All work runs on the current stream; results belong to the caller. An id outside its table reads row 0 of the table,
    moves nothing and is remembered for ``first_outside``.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        weights: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        optimizer: SparseOptimizerConfig,
    ) -> None:
        """Takes tensors that the kernels then update in place.

        Args:
            tables: one a feature; dims are multiples of 4.
            weights: float32 [rows, dim] of each table, views of one buffer.
            states: of each table, its Adagrad sums as in ``STATE_NAMES``, views of one buffer; nothing for ``sgd``.
            optimizer: kind (of ``KINDS``), first learning rate and eps.
        """
        assert optimizer.kind in KINDS
        self._kind, self._eps = optimizer.kind, optimizer.eps
        device = weights[0].device
        rows, dims = [table.rows for table in tables], [table.dim for table in tables]
        first_rows, columns = [0, *accumulate(rows)], [0, *accumulate(dims)]
        offsets = [0, *accumulate(weight.numel() for weight in weights)]
        self._all_rows, self._width = first_rows[-1], columns[-1]
        lines = [first_rows[:-1], rows, offsets[:-1], dims, columns[:-1], [int(table.mean) for table in tables]]
        self._fields = torch.tensor(lines, device=device)
        self._any_mean = any(table.mean for table in tables)
        self._tables = _joined(weights)
        self._state = _joined([of_table[0] for of_table in states]) if optimizer.kind != "sgd" else self._tables
        self._align = min(16, *(dim & -dim for dim in dims))
        self._block_d = max(16, 1 << (max(dims) - 1).bit_length())
        self._key_dtype = torch.int32 if self._all_rows < 2**31 else torch.int64
        self._outside = torch.zeros(2, len(tables), dtype=torch.int64, device=device)
        self._lr_on_host = optimizer.lr
        self._lr = torch.full((1,), optimizer.lr, dtype=torch.float32, device=device)

    def set_lr(self, lr: float) -> None:
        """Learning rate of updates after it on the current stream, replayed ones too."""
        if lr != self._lr_on_host:
            self._lr_on_host = lr
            self._lr.fill_(lr)

    def first_outside(self) -> tuple[int, int] | None:
        """Feature and id of a lookup outside its table since the last call. Synchronises the host."""
        lowest_F, highest_F = self._outside.tolist()
        found = [(feature, low or high) for feature, (low, high) in enumerate(zip(lowest_F, highest_F, strict=True))]
        found = [(feature, bad) for feature, bad in found if bad != 0]
        if found:
            self._outside.zero_()
        return found[0] if found else None

    def lookup(self, sparse: SparseBatch, dtype: torch.dtype) -> Tensor:
        """Pooled embeddings [B, E] in ``dtype``, summed in float32."""
        from models.kernels import embedding_rows

        fields = sparse.num_features
        batch = sparse.lengths.numel() // fields
        pooled = torch.empty(batch, self._width, dtype=dtype, device=sparse.values.device)
        # Bags are short and of several lengths: few in a program, so that the longest holds up few.
        rows = max(1, (2048 if sparse.single_valued else 512) // self._block_d)
        embedding_rows.lookup[(_programs(batch, rows), fields)](
            sparse.values,
            sparse.values if sparse.single_valued else _ends(sparse),
            sparse.values if sparse.weights is None else sparse.weights,
            self._fields,
            self._outside,
            self._tables,
            pooled,
            batch,
            fields,
            self._width,
            SINGLE=sparse.single_valued,
            WEIGHTED=sparse.weights is not None,
            ALIGN=self._align,
            BLOCK_B=rows,
            BLOCK_D=self._block_d,
            num_warps=4 if sparse.single_valued else 1,
        )
        return pooled

    def order(self, sparse: SparseBatch) -> Order:
        """Sorts the ids by row; equal ids keep their order."""
        from models.kernels import embedding_rows

        num_ids, fields = sparse.values.numel(), sparse.num_features
        batch, single = sparse.lengths.numel() // fields, sparse.single_valued
        mean = self._any_mean and not single
        keys = torch.empty(num_ids, dtype=self._key_dtype, device=sparse.values.device)
        bags = None if single else torch.empty_like(keys, dtype=torch.int32)
        scales = torch.empty_like(keys, dtype=torch.float32) if mean or sparse.weights is not None else None
        embedding_rows.sort_keys[(_programs(num_ids, 256),)](
            sparse.values,
            sparse.values if single else _ends(sparse),
            sparse.values if sparse.weights is None else sparse.weights,
            self._fields,
            keys,
            keys if bags is None else bags,
            keys if scales is None else scales,
            num_ids,
            batch,
            fields,
            self._all_rows,
            SINGLE=single,
            WEIGHTED=sparse.weights is not None,
            MEAN=mean,
            SEARCH_STEPS=sparse.lengths.numel().bit_length() + 1,
            BLOCK=256,
            num_warps=4,
        )
        by_feature = single and batch <= _ROWS_SORTED_ALONE
        keys, index = keys.reshape(fields if by_feature else 1, -1).sort(dim=1, stable=True)
        return Order(keys.flatten(), index.flatten(), by_feature, bags, scales)

    def update(self, gradient: Tensor, order: Order) -> None:
        """One optimizer step of every row that ``order`` names, in place.

        Args:
            gradient: [B, E], bf16 or float32, of the pooled embeddings.
            order: of the batch that the gradient is of.
        """
        from models.kernels import embedding_rows

        assert gradient.shape[1] == self._width
        gradient = gradient.contiguous()
        batch, fields = gradient.shape[0], self._fields.shape[1]
        num_ids = order.keys.numel()
        chunks = _programs(num_ids, _CHUNK)
        edges = torch.empty(chunks, 2, self._block_d, dtype=torch.float32, device=gradient.device)
        bags = order.keys if order.bags is None else order.bags
        shape = {
            "KIND": self._kind,
            "SINGLE": order.bags is None,
            "SORTED_BY_FEATURE": order.by_feature,
            "ALIGN": self._align,
            "CHUNK": _CHUNK,
            "BLOCK_D": self._block_d,
        }
        embedding_rows.update_inside[(chunks,)](
            order.keys,
            order.index,
            bags,
            order.keys if order.scales is None else order.scales,
            gradient,
            self._fields,
            self._tables,
            self._state,
            self._lr,
            edges,
            num_ids,
            batch,
            fields,
            self._width,
            self._all_rows,
            self._eps,
            SCALED=order.scales is not None,
            num_warps=4,
            **shape,
        )
        embedding_rows.update_across[(chunks,)](
            order.keys,
            order.index,
            bags,
            edges,
            self._fields,
            self._tables,
            self._state,
            self._lr,
            num_ids,
            batch,
            fields,
            self._all_rows,
            self._eps,
            BLOCK_C=_EDGES_AT_ONCE,
            num_warps=4,
            **shape,
        )


def _programs(count: int, block: int) -> int:
    return -(-count // block)


def _ends(sparse: SparseBatch) -> Tensor:
    """Int32 [F * B], where each bag ends in ``values``."""
    return sparse.lengths.cumsum(0, dtype=torch.int32)


def _joined(views: Sequence[Tensor]) -> Tensor:
    """The flat buffer that ``views`` fill one after the other."""
    total = sum(view.numel() for view in views)
    first = views[0].detach()
    joined = first.as_strided((total,), (1,), first.storage_offset())
    starts = accumulate((view.numel() for view in views), initial=0)
    for start, view in zip(starts, views, strict=False):
        assert view.is_contiguous()
        assert view.data_ptr() == joined.data_ptr() + start * joined.element_size()
    return joined

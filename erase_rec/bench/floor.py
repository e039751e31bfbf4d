"""The floor under a step: its arithmetic and its compulsory traffic, over what this device reaches on large problems.

Counted for the configuration at hand, not estimated. FLOPs: those of one training step of the plain form (matrix
products; two for a multiplication and an addition), so kernels that recompute something gain nothing by it. Bytes, each
crossing memory once, with activations and weights in the dtype that the model computes in:

===================  ===============================================================================================
``inputs``           ids (8 B), bag lengths (4 B), dense values and labels (4 B), read
``table rows``       different rows of the batch: weight read by the lookup, read and written by the update; the
                     optimizer's state read and written
``pooled``           pooled embeddings and their gradient: written and read
``activations``      what the plain form keeps for its backward (each storage once): written and read
``weights``          dense parameters read, and written by the update; float32 master copies of bf16 ones likewise
``gradients``        of dense parameters: written and read
``optimizer state``  of dense parameters: read and written
===================  ===============================================================================================

A kernel that recomputes activations moves less than ``activations`` says; everything else no program avoids, unless a
cache keeps it from one step to the next. The floor is the larger of the two times: arithmetic and traffic overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from erase_rec.batch import Batch, SparseBatch
from erase_rec.bench.batches import rows_touched
from erase_rec.config.schema import Config
from erase_rec.distributed.shards import Held
from erase_rec.protocols import CTRModel, TrainStep
from erase_rec.throughput import clock_for

COUNTED_ROWS = 16
"""Rows of the step that is counted; arithmetic and activations grow with the rows."""
_DENSE_STATES = {"adam": 2, "adamw": 2, "adagrad": 1, "sgd": 0}
"""Values that the dense optimizer keeps a parameter; sgd: one more with momentum."""


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches, measured.

    Attributes:
        bytes_per_s: of a large copy, read and written bytes counted.
        flops_per_s: of a large square matrix product in the dtype that the model computes in.
    """

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Ceilings:
        """Takes about a second. Median of some repetitions on random numbers."""
        on_cuda = device.type == "cuda"
        size, values = (8192, 1 << 28) if on_cuda else (512, 1 << 22)
        source = torch.randn(values, device=device)
        target = torch.empty_like(source)
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(left)
        copy_s = _median_s(lambda: target.copy_(source), device)
        product_s = _median_s(lambda: torch.mm(left, right, out=out), device)
        return cls(2 * 4 * values / copy_s, 2 * size**3 / product_s)


@dataclass(frozen=True)
class Floor:
    """The floor under one step.

    Attributes:
        flops: of the step.
        parts: bytes by kind, see the module.
        flops_ms: time of the arithmetic alone at the measured rate.
        bytes_ms: time of the traffic alone at the measured bandwidth.
    """

    flops: float
    parts: Mapping[str, float]
    flops_ms: float
    bytes_ms: float

    @property
    def floor_ms(self) -> float:
        """The larger of both."""
        return max(self.flops_ms, self.bytes_ms)


class NoTables(nn.Module):
    """Implements :class:`erase_rec.protocols.Embeddings` without tables: pooled embeddings are noise.

    Stands in where a step's arithmetic is counted or its towers alone are wanted.

    Attributes:
        pooled: what the last forward gave.
    """

    pooled: Tensor

    def __init__(self, feature_dims: Sequence[int]) -> None:
        super().__init__()
        self.feature_dims = list(feature_dims)

    def forward(self, sparse: SparseBatch) -> Tensor:
        """Noise [B, sum of dims]."""
        rows = sparse.lengths.numel() // sparse.num_features
        self.pooled = torch.randn(rows, sum(self.feature_dims), requires_grad=torch.is_grad_enabled())
        return self.pooled

    def expect(self, batch: Batch | None) -> None:
        """Nothing."""

    def order(self, sparse: SparseBatch) -> None:
        """Nothing."""

    def backward_and_update(self, pooled: Tensor, gradient: Tensor, order: object) -> None:
        """Nothing to update."""

    def set_lr(self, lr: float) -> None:
        """No rate is used."""

    def frozen_scalars(self) -> tuple[float, ...]:
        """None."""
        return ()

    def capture_problem(self, sparse: SparseBatch) -> str | None:
        """There is none."""
        return None

    def verify(self) -> None:
        """No id is looked up."""

    def idle(self) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""

    def tables(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """None."""
        return {}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Held]]) -> None:
        """There is none."""


@dataclass(frozen=True)
class Counted:
    """What one step of :data:`COUNTED_ROWS` rows does.

    Attributes:
        flops: matrix products' arithmetic.
        activations: floating values that it keeps for its backward.
        parameters: trained dense parameters.
    """

    flops: int
    activations: int
    parameters: int


def counting_config(config: Config) -> Config:
    """``config`` in the form whose work is counted: plain kernels, eager, float32, on the CPU."""
    return config.model_copy(
        update={
            "schedule": config.schedule.model_copy(
                update={"cuda_graph": "none", "dispatch": "blocking", "workers": 1, "strict": False}
            ),
            "distributed": config.distributed.model_copy(update={"reduction": None, "find_unused_parameters": None}),
            "model": config.model.model_copy(update={"compile": False, "kernels": "plain"}),
            "train": config.train.model_copy(update={"device": "cpu", "precision": "fp32", "micro_batches": 1}),
        }
    )


def count(step: TrainStep, model: CTRModel, tables: NoTables, batch: Batch) -> Counted:
    """Runs one step of :func:`counting_config`, built around ``tables``, and counts."""
    parameters = [each for name in model.tower_names() for each in model.tower(name).parameters()]
    parameters += model.over_arch.parameters()
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, tuple[torch.UntypedStorage, int]] = {}  # holds the storages, so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage, storage.nbytes() // tensor.element_size()
        return tensor

    with _Flops() as counter, torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
        step(batch)
    kept.pop(tables.pooled.untyped_storage().data_ptr(), None)  # a part of its own
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    return Counted(counter.total, sum(values for _, values in kept.values()), trained)


def floor(config: Config, counted: Counted, batch: Batch, feature_dims: Sequence[int], ceilings: Ceilings) -> Floor:
    """The floor under a step of ``config`` on ``batch``."""
    rows = batch.size
    compute = 2 if config.train.precision == "bf16" else 4
    flops = counted.flops * rows / COUNTED_ROWS
    dense = config.optimizer.dense
    states = _DENSE_STATES[dense.kind] + (dense.kind == "sgd" and dense.momentum > 0)
    master = 0 if compute == 4 else 2 * 4
    parts = {
        "inputs": float(
            8 * batch.sparse.values.numel() + 4 * (batch.sparse.lengths.numel() + batch.dense.numel() + rows)
        ),
        "table rows": table_bytes(config, rows_touched(batch), feature_dims),
        "pooled": float(4 * compute * rows * sum(feature_dims)),
        "activations": 2 * compute * counted.activations * rows / COUNTED_ROWS,
        "weights": float((2 * compute + master) * counted.parameters),
        "gradients": float(2 * compute * counted.parameters),
        "optimizer state": float(2 * 4 * states * counted.parameters),
    }
    flops_ms, bytes_ms = 1e3 * flops / ceilings.flops_per_s, 1e3 * sum(parts.values()) / ceilings.bytes_per_s
    return Floor(flops, parts, flops_ms, bytes_ms)


def table_bytes(config: Config, rows: Sequence[int], feature_dims: Sequence[int]) -> float:
    """Traffic of so many different rows of each feature's table: lookup and update."""
    kind = config.optimizer.sparse.kind
    passes = 1 if config.schedule.embedding_gradient == "none" else 3
    total = 0
    for touched, dim in zip(rows, feature_dims, strict=True):
        state = {"rowwise_adagrad": 1, "adagrad": dim, "adam": 2 * dim, "sgd": 0}[kind]
        total += 4 * touched * (passes * dim + (2 * state if passes > 1 else 0))
    return float(total)


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types no subclass hook
    """Counts by torch's own formulas. Not ``FlopCounterMode``: its module hooks do not go with ``autograd.grad``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def _unpacked(tensor: Tensor) -> Tensor:
    return tensor


def _median_s(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    clock = clock_for(device)
    work()
    seconds = []
    for _ in range(repeats):
        start = clock.mark()
        work()
        seconds.append(clock.seconds(start, clock.mark()))
    return sorted(seconds)[repeats // 2]

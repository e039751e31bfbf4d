"""What a step consumes and produces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SparseBatch:
    """Bags of category ids, feature-major like TorchRec's KeyedJaggedTensor.

    ``values`` (and ``weights`` with it) may be longer than the bags together, so that batches of different numbers of
    ids have one shape: what lies past the last bag is padding. It may hold any number, is never looked up or checked
    against a table, and changes neither the pooled embeddings nor an update.

    Attributes:
        values: int64 [total ids and padding], feature 0's bags first.
        lengths: int32 [F * B], ids a bag, feature-major.
        weights: float32, as long as ``values``, or None when no feature is weighted (weight 1 where a feature is not).
        num_features: F.
        single_valued: every length is 1 and there is no padding (then ``values`` viewed as [F, B] is the ids).
        counts: ids of each feature, where the host knows them without asking a device. Whoever replaces ``lengths``, or
            keeps them at an address where they change, sets None.
    """

    values: Tensor
    lengths: Tensor
    weights: Tensor | None
    num_features: int
    single_valued: bool = False
    counts: tuple[int, ...] | None = None

    def ids_of_features(self) -> list[int]:
        """Ids of each feature, F numbers. Synchronises the host for multi-valued bags on CUDA without ``counts``."""
        if self.single_valued:
            return [self.lengths.numel() // self.num_features] * self.num_features
        if self.counts is not None:
            return list(self.counts)
        found: list[int] = self.lengths.reshape(self.num_features, -1).sum(dim=1).tolist()
        return found

    def counted(self) -> SparseBatch:
        """The same with :attr:`counts`, for a batch in host memory that goes to a device."""
        return replace(self, counts=tuple(self.ids_of_features()))

    def tensors(self) -> list[Tensor]:
        """Values, lengths and, where there are some, weights."""
        return [self.values, self.lengths, *([] if self.weights is None else [self.weights])]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> SparseBatch:
        """Copies to ``device``; asynchronous with respect to the host only from pinned memory."""
        return SparseBatch(
            self.values.to(device, non_blocking=non_blocking),
            self.lengths.to(device, non_blocking=non_blocking),
            None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
            self.num_features,
            self.single_valued,
            self.counts,
        )

    def pin_memory(self) -> SparseBatch:
        """Copies to page-locked host memory."""
        return SparseBatch(
            self.values.pin_memory(),
            self.lengths.pin_memory(),
            None if self.weights is None else self.weights.pin_memory(),
            self.num_features,
            self.single_valued,
            self.counts,
        )


@dataclass(frozen=True)
class Batch:
    """Rows of a click log after the feature transforms.

    Attributes:
        dense: float32 [B, N], finite; or wider, with zero columns after the N-th.
        sparse: the bags of the F sparse features.
        label: float32 [B], 0 or 1.
        row_ids: int64 [B] on the host, the rows' positions in their split: names rows in messages.
        arrived: of a batch on a CUDA device: after this event its tensors hold their content, and nobody writes to them
            any more, so that another stream than the main one can read them ahead of the main stream's work. None:
            after what the current stream was given so far. Whoever replaces a tensor sets None.
    """

    dense: Tensor
    sparse: SparseBatch
    label: Tensor
    row_ids: Tensor
    arrived: torch.cuda.Event | None = None

    @property
    def size(self) -> int:
        """Rows in the batch."""
        return int(self.label.shape[0])

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        """Copies to ``device``; ``row_ids`` stays on the host."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.label.to(device, non_blocking=non_blocking),
            self.row_ids,
        )

    def arriving(self, stream: torch.cuda.Stream) -> Batch:
        """The same, with :attr:`arrived` after what ``stream`` was given so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return replace(self, arrived=event)

    def pin_memory(self) -> Batch:
        """Copies to page-locked host memory."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.label.pin_memory(), self.row_ids)


@dataclass(frozen=True)
class StepOutput:
    """What one training step leaves behind; every tensor is detached and ready on the main stream.

    They are of this step until the next one, which may write where they are.

    Attributes:
        logit: [B], the model's logit before this step's update.
        tower_logits: [B] a tower.
        loss: scalar, the main loss.
        finite: bool [losses], whether the main loss and each local one, in order, is finite.
        local_losses: scalar a tower with a local loss, before its weight.
        grad_norms: scalar a tower (and ``over_arch``, ``embeddings``); empty unless measuring was asked for.
    """

    logit: Tensor
    tower_logits: Mapping[str, Tensor]
    loss: Tensor
    finite: Tensor
    local_losses: Mapping[str, Tensor] = field(default_factory=dict)
    grad_norms: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """Logits of an evaluation forward: [B] for the model and a tower.

    Attributes:
        logit: the model's.
        tower_logits: the towers'.
        terms: what each tower's logit adds to the model's; empty where the over-arch does not add logits, or where
            nobody asked.
        without: the model's, had a tower given an output and a logit of 0; empty where nobody asked.
    """

    logit: Tensor
    tower_logits: Mapping[str, Tensor]
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    without: Mapping[str, Tensor] = field(default_factory=dict)

"""Batches on their way to the device: pinned, copied without stopping the host, and whole however slow the step is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from data.block import Bags, EncodedBlock, Rows
from data.loader import Loader
from data.store import MemoryStore
from erase_rec.batch import Batch
from erase_rec.prefetch import prefetch

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SLOW_CYCLES = 20_000_000
"""About 10 ms: the host hands out many batches while the first step runs."""


def make_store(*, bags: bool) -> MemoryStore:
    """Whole numbers, whose sums are exact in any order."""
    blocks = []
    for number in range(10):
        rng = np.random.default_rng(number)
        lengths = rng.integers(0, 4, 1000)
        values = rng.integers(0, 1000, lengths.sum()).astype(np.int32)
        column = Bags(values, np.concatenate([[0], np.cumsum(lengths)]), rng.integers(0, 9, len(values)).astype("f4"))
        blocks.append(
            EncodedBlock(
                dense=[rng.integers(0, 1000, 1000).astype(np.float32) for _ in range(13)],
                ids=[rng.integers(0, 1000, 1000).astype(np.int32) for _ in range(26)],
                bags={3: column} if bags else {},
                label=rng.integers(0, 2, 1000).astype(np.uint8),
                rows=Rows("made up", "row", np.arange(1000) + 1),
            )
        )
    return MemoryStore(blocks)


def parts(batch: Batch) -> list[Tensor]:
    sparse = batch.sparse
    weights = [] if sparse.weights is None else [sparse.weights]
    return [batch.dense, batch.label, sparse.values, sparse.lengths, *weights]


def checksum(batch: Batch) -> Tensor:
    """Sums that change with the values and with their order."""
    return torch.stack(
        [
            (part.double().view(-1) * torch.arange(1, part.numel() + 1, device=part.device)).sum()
            for part in parts(batch)
        ]
    )


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_copy_overwrites_a_batch_that_a_step_still_reads(bags: bool, workers: int) -> None:
    """The host frees each batch long before the device has read it: on the main stream, every other one beside it."""
    store = make_store(bags=bags)
    plain = Loader(store, local_batch_size=300, shuffle_seed=1, window_rows=2500)
    expected = [checksum(batch) for epoch in range(2) for batch in plain.batches(epoch)]
    loader = Loader(store, local_batch_size=300, shuffle_seed=1, window_rows=2500, workers=workers, pin=True)
    batches = prefetch(loader.batches(0, endless=True), CUDA)
    main, reader = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    found: list[Tensor] = []
    for _ in expected:
        batch = next(batches)
        assert all(part.is_cuda for part in parts(batch))
        assert not batch.row_ids.is_cuda
        beside = len(found) % 2 == 1
        if beside:
            assert batch.arrived is not None
            reader.wait_event(batch.arrived)
        torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(reader) if beside else nullcontext():
            found.append(checksum(batch))
        main.wait_stream(reader)
        del batch
    batches.close()
    for number, (device, host) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(device.cpu(), host), f"batch {number}"


@pytest.mark.parametrize("bags", [False, True])
def test_batches_are_pinned_where_they_are_to_be(bags: bool) -> None:
    """Those that are joined from two windows, too."""
    loader = Loader(make_store(bags=bags), local_batch_size=700, shuffle_seed=1, window_rows=1000, pin=True)
    for batch in loader.batches(0):
        assert all(part.is_pinned() for part in parts(batch))


def test_handing_out_a_batch_does_not_wait_for_the_device(
    host_never_waits: Callable[[], AbstractContextManager[None]],
) -> None:
    loader = Loader(make_store(bags=False), local_batch_size=300, shuffle_seed=1, window_rows=2500, pin=True)
    batches = prefetch(loader.batches(0), CUDA)
    next(batches)
    with host_never_waits():
        for _ in range(5):
            torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]
            next(batches)
    batches.close()

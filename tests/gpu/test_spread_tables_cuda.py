"""Tables of TorchRec's sharded collection on one NCCL rank: ids a step ahead of it, rows in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from erase_rec.batch import Batch, SparseBatch
from erase_rec.config.presets import apply_preset
from erase_rec.config.schema import Config
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.shards import Shards
from erase_rec.distributed.world import World
from erase_rec.prefetch import prefetch
from erase_rec.protocols import Embeddings
from models.embeddings.build import build_rank_embeddings

pytestmark = pytest.mark.gpu

ROWS_OF = {"user": 100_000, "item": 20_000, "day": 7}
DIM = 16
STEPS = 20
ROWS = 512
CACHE_SHARE = 0.1
"""Of 120,000 rows, of which 20 steps touch 28,000: rows are put out of the cache again."""
SLOW_CYCLES = 4_000_000
"""About 2 ms: the host is many steps ahead of the device."""
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(on_cuda=True, timeout_s=60, grouped=True) as joined:
        yield joined


def config_of(kernel: str, kind: str, sharding: str = "table_wise") -> Config:
    cache = {"cache_share": CACHE_SHARE} if kernel == "fused_uvm_caching" else {}
    tables = [{"name": name, "kernel": kernel} | cache for name in ("user", "item")]
    if sharding == "auto":
        tables.append({"name": "day", "sharding": "data_parallel"})
    plain = {
        "data": {"kind": "synthetic"},
        "features": {
            "sparse": [
                {"name": name, "num_embeddings": rows, "embedding_dim": DIM, "multi_valued": True, "pooling": "mean"}
                for name, rows in ROWS_OF.items()
            ]
        },
        "embedding": {"sharding": sharding, "tables": tables},
        "towers": [{"name": "deep", "kind": "mlp", "loss": {}}],
        "schedule": {"preset": "erase"},
        "optimizer": {"sparse": {"kind": kind, "lr": 0.1}},
        "train": {"steps": STEPS, "local_batch_size": ROWS},
    }
    return apply_preset(Config.model_validate(plain))[0]


def batches(*, bags: bool, pin: bool = True) -> Iterator[Batch]:
    """The same in each call; of bags there is padding behind the last one. The last batch is short."""
    generator = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        rows = ROWS // 3 if step == STEPS - 1 else ROWS
        cells = len(ROWS_OF) * rows
        lengths = torch.randint(0, 4, (cells,), generator=generator) if bags else torch.ones(cells, dtype=torch.int64)
        counts = lengths.reshape(len(ROWS_OF), -1).sum(dim=1).tolist()
        ids = [
            torch.randint(0, limit, (count,), generator=generator)
            for limit, count in zip(ROWS_OF.values(), counts, strict=True)
        ]
        padding = [torch.full((step,), -1)] if bags else []
        sparse = SparseBatch(torch.cat(ids + padding), lengths.int(), None, len(ROWS_OF), single_valued=not bags)
        batch = Batch(torch.zeros(rows, 1), sparse, torch.zeros(rows), torch.arange(rows))
        yield batch.pin_memory() if pin else batch


def train(embeddings: Embeddings, device: torch.device, *, bags: bool, ahead: bool, slow: bool = False) -> list[Tensor]:
    """What the steps looked up, and an evaluation in the middle of them."""
    pooled = []
    expect = embeddings.expect if ahead else None
    for step, batch in enumerate(prefetch(batches(bags=bags, pin=device.type == "cuda"), device, expect=expect)):
        if slow:
            torch.cuda._sleep(SLOW_CYCLES)
        found = embeddings(batch.sparse)
        pooled.append(found.detach().clone())
        generator = torch.Generator().manual_seed(step)
        gradient = torch.randn(found.shape, generator=generator).to(device)
        embeddings.backward_and_update(found, gradient, embeddings.order(batch.sparse))
        if step == STEPS // 2:
            with torch.no_grad():
                pooled.append(embeddings(next(batches(bags=bags, pin=False)).sparse.to(device)).clone())
    embeddings.verify()
    return pooled


def state_of(embeddings: Embeddings) -> State:
    """Copies of tables and optimizer state; of a cache's rows where they belong."""
    held = dict(embeddings.tables())
    for name, entries in embeddings.optimizer_state().items():
        held |= {f"{name}.{key}": value for key, value in entries.items()}
    found = {}
    for name, value in held.items():
        parts = [part.tensor for part in value.parts] if isinstance(value, Shards) else [value]
        found |= {f"{name}.{number}": part.detach().cpu().clone() for number, part in enumerate(parts)}
    return found


def build(config: Config, device: torch.device, world: World) -> Embeddings:
    embeddings, plan = build_rank_embeddings(config, ROWS_OF, device, torch.float32, world)
    assert plan is not None
    return embeddings


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "auto"])
@pytest.mark.parametrize("bags", [False, True])
def test_ids_a_step_ahead_give_the_bits_of_ids_in_time(
    world: World, device: torch.device, sharding: str, bags: bool
) -> None:
    """The device is slow: what is made ahead lies there for long, and what is freed could be taken too early."""
    config = config_of("fused", "rowwise_adagrad", sharding)
    found = []
    for ahead in (False, True):
        embeddings = build(config, device, world)
        pooled = train(embeddings, device, bags=bags, ahead=ahead, slow=ahead)
        found.append((pooled, state_of(embeddings)))
    (pooled, state), (pooled_ahead, state_ahead) = found
    assert len(pooled) == len(pooled_ahead) == STEPS + 1
    assert all(map(torch.equal, pooled, pooled_ahead))
    assert [name for name, value in state.items() if not torch.equal(value, state_ahead[name])] == []


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_rows_in_host_memory_are_trained_like_rows_on_the_device(
    world: World, device: torch.device, kernel: str, kind: str
) -> None:
    """Also those that a cache put back, and those that a checkpoint put under it."""
    reference, embeddings = (build(config_of(each, kind), device, world) for each in ("fused", kernel))
    initial = state_of(reference)
    expected = train(reference, device, bags=True, ahead=False)
    trained = state_of(reference)
    assert not torch.equal(trained["user.0"], initial["user.0"])
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}  # float32: sums of gradients of a row in another order
    for _ in range(2):
        start = state_of(embeddings)
        assert start.keys() == initial.keys()
        assert all(torch.equal(start[name], value) for name, value in initial.items())
        torch.testing.assert_close(train(embeddings, device, bags=True, ahead=True), expected, **close)
        torch.testing.assert_close(state_of(embeddings), trained, **close)
        restore(embeddings, initial)


def restore(embeddings: Embeddings, state: State) -> None:
    """As a checkpoint does: into the parts, then the optimizer's state."""
    held = dict(embeddings.tables())
    states = embeddings.optimizer_state()
    for name, entries in states.items():
        held |= {f"{name}.{key}": value for key, value in entries.items()}
    for name, value in held.items():
        if isinstance(value, Shards):
            for number, part in enumerate(value.parts):
                part.tensor.copy_(state[f"{name}.{number}"])
    whole = {
        name: {key: value if isinstance(value, Shards) else state[f"{name}.{key}.0"] for key, value in entries.items()}
        for name, entries in states.items()
    }
    embeddings.load_optimizer_state(whole)

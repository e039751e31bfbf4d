"""TorchRec's estimates of tables on hundreds of ranks in seconds: shards of one size are estimated once.

``row_wise`` and ``data_parallel`` cut a table into a shard a rank. TorchRec estimates each by itself, milliseconds
apiece: minutes for a hundred tables on 512 ranks. What it finds depends on a shard's size and not on its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Topology


class EqualShardsEstimator(EmbeddingPerfEstimator):  # type: ignore[misc]  # torchrec has no types
    """The time estimates of its base, made for one shard of each size."""

    def estimate(self, sharding_options: Sequence[Any], *sharders: Any, **named: Any) -> None:
        """Fills in ``perf`` of every shard of every option; the sharders' argument has had two names in TorchRec."""
        for option in sharding_options:
            every = option.shards
            first_of = {tuple(shard.size): shard for shard in reversed(every)}
            option.shards = [*first_of.values()]
            super().estimate([option], *sharders, **named)
            option.shards = every
            for shard in every:
                # A copy: the partitioner adds to what it is given.
                shard.perf = copy(first_of[tuple(shard.size)].perf)


def make_enumerator(topology: Topology, batch_size: int, constraints: Mapping[str, Any]) -> EmbeddingEnumerator:
    """TorchRec's list of what each table may be cut into, with this estimator in place of its own."""
    estimators = [
        EqualShardsEstimator(topology=topology, constraints=constraints),
        EmbeddingStorageEstimator(topology=topology, constraints=constraints),
    ]
    return EmbeddingEnumerator(topology=topology, batch_size=batch_size, constraints=constraints, estimator=estimators)

"""The ids of a batch on their way to the ranks that hold their rows, ahead of the lookup that reads the rows.

TorchRec's input distribution (``ShardedEmbeddingBagCollection.input_dist``), in stages that a step can stand between:
ranks tell each other how many ids they will send, then send them; the lookup takes what has arrived. Of batch k + 1:

=============  ====================================================  ==================================================
stage          when                                                  log of collectives
=============  ====================================================  ==================================================
``announce``   in step k, after its lookup has exchanged rows        ``tables.input_sizes``
``send``       in step k, before its tables' gradients are           ``tables.input``
               exchanged; the host waits for the sizes
``receive``    in the lookup of step k + 1                           (``tables.exchange``, with the rows)
=============  ====================================================  ==================================================

Only ids are ahead: rows are read after update k, so that none is stale (as in TorchRec's TrainPipelineSparseDist).

All collectives go through one process group. With a second one ids could pass the gradients that are reduced meanwhile,
but NCCL's communicators must not be used at the same time: their kernels wait on the device for other ranks, and which
of two runs first is left to each device (NVIDIA/nccl#195, and NCCL's user guide on several communicators). Within one,
collectives run in the order in which the host asks for them, which is the same on every rank and is what the log holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from erase_rec.batch import SparseBatch
from erase_rec.data_stream import DataStream
from erase_rec.distributed.world import World

INPUT_SIZES, INPUT = "tables.input_sizes", "tables.input"
"""Groups of the log of collectives."""


@dataclass(frozen=True)
class Ids:
    """A batch as TorchRec takes it.

    Attributes:
        features: a KeyedJaggedTensor whose ids are all inside their tables.
        outside: int64 [2], feature and number of the first id that was not, and was replaced; -1 where there is none.
        rows: of the batch.
        counts: ids of each feature.
    """

    features: Any
    outside: Tensor
    rows: int
    counts: list[int]


class SentIds:
    """Sends the ids of one batch; every rank calls the same methods at the same places of its program."""

    def __init__(
        self,
        sparse: SparseBatch,
        *,
        collection: Any,
        make: Callable[[SparseBatch], Ids],
        world: World,
        stream: DataStream,
        arrived: Any,
    ) -> None:
        """Sends nothing yet.

        Args:
            sparse: the bags; their content may be on its way to the device.
            collection: a ShardedEmbeddingBagCollection.
            make: checks ids and gives them TorchRec's form.
            world: the ranks.
            stream: where that is done, and collectives are asked for.
            arrived: event after which ``sparse`` has its content; None: after what the current stream was given by
                the first call.
        """
        self.sparse = sparse
        self._collection, self._make, self._world, self._stream = collection, make, world, stream
        self._after = arrived
        self._ids: Ids | None = None
        self._sizes: Any = None
        self._parts: Any = None

    def ids(self) -> Ids:
        """What is sent; made by the first call."""
        if self._ids is None:
            with self._stream.run(self._after), torch.no_grad():
                self._ids = self._make(self.sparse)
            self._after = self._stream.mark()
        return self._ids

    def announce(self) -> None:
        """Begins to tell other ranks how many ids come; collective. Waits for no other rank.

        On CUDA the host waits for this stream alone where tables are spread by row: their ids are counted there.
        """
        if self._sizes is not None:
            return
        features = self.ids().features
        self._context = self._collection.create_context()
        with self._world.lent(INPUT_SIZES), self._stream.run(self._after):
            self._sizes = self._collection.input_dist(self._context, features)

    def send(self) -> None:
        """Begins to send them; collective. The host waits until all ranks have announced theirs."""
        self.announce()
        if self._parts is None:
            with self._world.lent(INPUT), self._stream.run(self._after):
                self._parts = self._sizes.wait()

    def receive(self) -> tuple[Any, Any]:
        """What this rank looks up (TorchRec's context and KJTList), usable on the current stream; gloo: the host waits.

        Called within the block of :meth:`erase_rec.distributed.world.World.lent` of what follows, which names errors.
        """
        with self._stream.run(self._after), torch.no_grad():
            received = self._parts.wait()
        self._stream.use(received, self._context, self.ids().outside)
        return self._context, received

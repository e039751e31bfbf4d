"""Checkpoints: named tensors through torch.distributed.checkpoint, numbers and strings as JSON, published atomically.

``checkpoints/step_00000010/`` holds the tensors' files and the record (:mod:`.record`). A checkpoint is written under
another name and renamed when it is complete and on the disk (:mod:`.writing`), so a save that is killed leaves nothing
that looks like a checkpoint. ``last`` and ``best`` are text files that name a checkpoint (:mod:`.manager`). Training
can go on meanwhile (:mod:`.background`).

What several ranks hold parts of (:class:`erase_rec.distributed.shards.Shards`) is one tensor in a checkpoint, of which
each rank writes its parts into files of its own; everything else the first rank writes. So nothing in a checkpoint
depends on how tables were spread, or over how many ranks (:mod:`.reading`). The ranks must see one folder.
"""

from erase_rec.checkpoint.manager import BEST_FILE, LAST_FILE, CheckpointManager
from erase_rec.checkpoint.reading import load
from erase_rec.checkpoint.record import (
    FORMAT,
    STATE_FILE,
    CheckpointError,
    CheckpointFormatError,
    read_state,
    sealed,
    stored_layout,
    verify,
)
from erase_rec.checkpoint.writing import PARTIAL, REPLACED

__all__ = [
    "BEST_FILE",
    "FORMAT",
    "LAST_FILE",
    "PARTIAL",
    "REPLACED",
    "STATE_FILE",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointManager",
    "load",
    "read_state",
    "sealed",
    "stored_layout",
    "verify",
]

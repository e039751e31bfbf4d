"""Towers and over-arch through TorchInductor (``model.compile``): fewer, fused kernels for the same numbers.

Compiled is the training forward (and its backward) for the row counts of a full batch, at the second such batch;
evaluation and other row counts, such as a short last batch, run the modules as they are, so nothing is compiled again.
Inductor keeps what it made in ``TORCHINDUCTOR_CACHE_DIR`` (default: ``torchinductor_<user>`` in the system's folder for
temporary files): a later run of the same model on the same machine reads it from there, in seconds. Its own CUDA graphs
stay off, because ``schedule.cuda_graph`` captures; its search over tile sizes too, because its choice would differ from
run to run.

CUDA only: on the CPU ``model.compile`` changes nothing but a remark, as Inductor would ask for a C++ compiler there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from erase_rec.precision import dense_modules
from erase_rec.protocols import CTRModel
from erase_rec.schedule.plan import OVER_ARCH
from erase_rec.schedule.step_state import micro_rows

Forward = Callable[..., Any]
_VARIANTS = 4
"""Programs that a block may need, one for each combination of what requires gradients."""
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "triton.cudagraphs": False,
    "coordinate_descent_tuning": False,
    "max_autotune": False,
}


def compiled_forwards(
    model: CTRModel, local_batch_size: int, micro_batches: int, device: torch.device, say: Callable[[str], None]
) -> dict[str, Forward]:
    """Forwards by tower name and ``over_arch``, to be called in training mode; they compile themselves.

    Args:
        model: on ``device``, in the precision that it computes in.
        local_batch_size: rows of a full batch.
        micro_batches: parts that it is cut into.
        device: none is compiled on the CPU, and a remark says so.
        say: takes that remark, or how long compiling took.
    """
    if device.type != "cuda":
        say("model.compile: towers and over-arch are compiled on CUDA only; here they run as they are")
        return {}
    # At its first use only: CPU runs need no compiler in memory. All towers' forwards are one code object to it.
    from torch._dynamo import config as dynamo_config

    rows = {rows.stop - rows.start for rows in micro_rows(local_batch_size, micro_batches)}
    names = [*model.tower_names(), OVER_ARCH]
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, _VARIANTS * len(names) * len(rows))
    progress = _Progress(len(names) * len(rows), say)
    return {name: _Compiled(module, rows, progress) for name, module in zip(names, dense_modules(model), strict=True)}


class _Progress:
    """Says once how long compiling took."""

    def __init__(self, expected: int, say: Callable[[str], None]) -> None:
        self._expected = expected
        self._say = say
        self._done = 0
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """One more is compiled; no synchronisation: the host is what compiles."""
        self._done += 1
        self._seconds += seconds
        if self._done == self._expected:
            self._say(f"model.compile: compiled {self._done} blocks in {self._seconds:.0f} s")


class _Compiled:
    """A module's forward, compiled for some row counts."""

    def __init__(self, module: Forward, rows: Collection[int], progress: _Progress) -> None:
        self._plain = module
        self._compiled: Forward = torch.compile(module, dynamic=False, fullgraph=True, options=_OPTIONS)
        self._new = set(rows)
        self._uncompiled = set(rows)
        self._rows = frozenset(rows)
        self._progress = progress

    def __call__(self, *inputs: Any) -> Any:
        """As the module."""
        first: Tensor = inputs[0] if isinstance(inputs[0], Tensor) else inputs[0][0]
        rows = first.shape[0]
        if rows not in self._rows or rows in self._new:
            # The first batch runs plainly too: what a module makes at its first use is there when it is compiled.
            self._new.discard(rows)
            return self._plain(*inputs)
        if rows not in self._uncompiled:
            return self._compiled(*inputs)
        self._uncompiled.discard(rows)
        start = time.perf_counter()
        # The backward too, now and on the thread that calls: workers would compile it while other towers are compiled.
        # It must leave what the forward saved: some plans differentiate for the tables by a pass of its own.
        with functorch_config.patch(force_non_lazy_backward_lowering=True, donated_buffer=False):
            result = self._compiled(*inputs)
        self._progress.add(time.perf_counter() - start)
        return result

"""Gradients of parameters on a stream beside the one of the gradients of inputs.

The critical path of a backward is the chain of its input gradients: each layer's needs the one of the layer above. A
parameter's gradient is needed by its update alone, so the chain need not wait for it. A schedule puts a
:class:`ParameterStream` around a block's forward (:func:`beside`); the layers' kernels keep it (:func:`current`) and
launch in their backward on it what only parameters need (:func:`launched`). Whoever reads the gradients calls
:meth:`ParameterStream.join` first.

What goes there has to be the gradient of a leaf that is used once in a forward: autograd would add up the gradients of
several uses on the stream of the backward, which waits for nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class ParameterStream(Protocol):
    """Runs computations that the current stream goes on without, until they are joined."""

    def run(self, compute: Callable[[], Result], reads: Sequence[Tensor]) -> Result:
        """Runs ``compute`` after what the current stream was given so far.

        Args:
            compute: launches work on the stream that is current inside.
            reads: what it reads; kept until :meth:`join`.

        Returns:
            Its result, not ready before :meth:`join`.
        """
        ...

    def join(self) -> None:
        """Lets the current stream wait for all that was run since the last call; the host does not wait."""
        ...


class CudaParameterStream:
    """A CUDA stream. Its results are allocated for it, and reused by it alone."""

    def __init__(self, device: torch.device) -> None:
        """Makes the stream."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._reads: list[Sequence[Tensor]] = []

    def run(self, compute: Callable[[], Result], reads: Sequence[Tensor]) -> Result:
        """See :class:`ParameterStream`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = compute()
        self._reads.append(reads)
        return result

    def join(self) -> None:
        """See :class:`ParameterStream`."""
        if self._reads:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._reads.clear()


_current: ContextVar[ParameterStream | None] = ContextVar("parameter_stream", default=None)


@contextmanager
def beside(stream: ParameterStream | None) -> Iterator[None]:
    """What runs inside launches its parameters' gradients on ``stream``, in whatever thread its backward runs."""
    token = _current.set(stream)
    try:
        yield
    finally:
        _current.reset(token)


def current(*parameters: Tensor | None) -> ParameterStream | None:
    """The stream for the gradients of ``parameters``; None where none is set, or where one of them is no leaf."""
    stream = _current.get()
    leaves = all(parameter is None or parameter.is_leaf for parameter in parameters)
    return stream if leaves else None


def launched(stream: ParameterStream | None, compute: Callable[[], Result], *reads: Tensor) -> Result:
    """``compute`` on ``stream``; at once, on the current one, where that is None."""
    return compute() if stream is None else stream.run(compute, reads)

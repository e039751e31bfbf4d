"""What a program may do while a run trains: hooks that are told of steps, logs, evaluations and checkpoints.

Only the first rank calls them, as it alone writes and speaks. They must not change the model: what a resumed run comes
to depends on the run's files alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from erase_rec.config.schema import Config
from erase_rec.errors import UserError
from erase_rec.protocols import EvalResult
from erase_rec.summary import Summary


class CallbackError(UserError):
    """A callback raised; names it and the step. The run's newest checkpoint is kept; the cause is what was raised."""


@dataclass
class RunState:
    """A run as its callbacks see it.

    Attributes:
        config: complete.
        folder: the run folder.
        total_steps: updates until the end, if nothing ends it before.
        step: updates done.
        epoch: whole passes over the training rows done.
        stop_reason: why a callback wants the run to end; None: none does.
    """

    config: Config
    folder: Path
    total_steps: int = 0
    step: int = 0
    epoch: int = 0
    stop_reason: str | None = None

    def stop(self, reason: str = "a callback asked for it") -> None:
        """Ends the run as ``stopped_early`` after this step, with an evaluation and a checkpoint.

        With several ranks it ends after the next step that is logged.
        """
        self.stop_reason = reason


class Callback:
    """Base class: override what is to be told. What a hook raises ends the run, see :class:`CallbackError`."""

    def on_start(self, run: RunState) -> None:
        """Before the first step, of a resumed run before the next."""

    def on_step(self, run: RunState) -> None:
        """After each update. The device may still be at work on it."""

    def on_log(self, run: RunState, values: Mapping[str, float]) -> None:
        """After a log interval.

        Args:
            run: the run.
            values: by tag, as in ``metrics.jsonl``: ``train/ne``, ``tower/<name>/ne``, ``throughput/qps_mean``, ...
        """

    def on_eval(self, run: RunState, result: EvalResult) -> None:
        """After an evaluation of the held-out rows."""

    def on_checkpoint(self, run: RunState, path: Path) -> None:
        """After a checkpoint was published at ``path``; retention removes it some checkpoints later."""

    def on_end(self, run: RunState, summary: Summary) -> None:
        """At the end, however it came: ``summary.status`` says how. The summary is written."""


@dataclass
class Callbacks:
    """The callbacks of a run, called in their order.

    Attributes:
        callbacks: the same on every rank.
        state: what they are given.
        is_first: whether this rank calls them.
    """

    callbacks: Sequence[Callback]
    state: RunState
    is_first: bool = True
    _due: list[tuple[str, Callable[[Callback], None]]] = field(default_factory=list, init=False)

    def start(self, step: int, epoch: int) -> None:
        """See :meth:`Callback.on_start`."""
        self._due.append(("on_start", lambda callback: callback.on_start(self.state)))
        self.tell(step, epoch)

    def step(self) -> None:
        """See :meth:`Callback.on_step`; told by :meth:`tell`, as all that follow."""
        self._due.append(("on_step", lambda callback: callback.on_step(self.state)))

    def log(self, values: Mapping[str, float]) -> None:
        """See :meth:`Callback.on_log`."""
        self._due.append(("on_log", lambda callback: callback.on_log(self.state, values)))

    def evaluation(self, result: EvalResult) -> None:
        """See :meth:`Callback.on_eval`."""
        self._due.append(("on_eval", lambda callback: callback.on_eval(self.state, result)))

    def checkpoint(self, path: Path) -> None:
        """See :meth:`Callback.on_checkpoint`."""
        self._due.append(("on_checkpoint", lambda callback: callback.on_checkpoint(self.state, path)))

    def tell(self, step: int, epoch: int) -> None:
        """Calls the hooks that are due, where the run is between two steps: a checkpoint of this state is whole.

        Raises:
            CallbackError: a callback raised; no other hook than :meth:`end` is called after that.
        """
        self.state.step, self.state.epoch = step, epoch
        due, self._due = self._due, []
        for hook, call in due if self.is_first else ():
            for callback in self.callbacks:
                try:
                    call(callback)
                except Exception as error:
                    raise self._error(callback, hook, error) from error

    def end(self, summary: Summary) -> None:
        """See :meth:`Callback.on_end`; every callback is told, also after one has failed.

        Raises:
            CallbackError: of the first that raised.
        """
        failed: CallbackError | None = None
        for callback in self.callbacks if self.is_first else ():
            try:
                callback.on_end(self.state, summary)
            except Exception as error:  # noqa: BLE001, anything that a user's code may raise; the others are told first
                failed = failed or self._error(callback, "on_end", error)
        if failed is not None:
            raise failed

    def _error(self, callback: Callback, hook: str, error: Exception) -> CallbackError:
        found = CallbackError(
            f"callback {type(callback).__name__}.{hook} raised {type(error).__name__} at step {self.state.step}: "
            f"{error}; the run {self.state.folder} keeps its newest checkpoint: mend the callback and resume the run"
        )
        found.__cause__ = error
        return found

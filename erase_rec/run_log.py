"""The run log: TensorBoard events and ``metrics.jsonl`` of one run.

:class:`RunLog` is the null logger and the base class; ranks other than 0 use it. Both files survive a kill: what
:meth:`FileRunLog.scalars` got of earlier steps is with the operating system when it returns.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from erase_rec.config.schema import Config
from erase_rec.dashboards import (
    PEAK_MEMORY,
    arm_hash,
    hparams_end_summary,
    hparams_summaries,
    hyperparameters,
    layout_summary,
)
from erase_rec.protocols import EvalResult
from erase_rec.summary import Summary as RunSummary

EVENT_PREFIX = "events.out.tfevents."
METRICS_FILE = "metrics.jsonl"


class RunLog:
    """Takes everything and writes nothing."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Logs values by tag at ``step`` (updates done so far), which never decreases."""

    def text(self, tag: str, text: str) -> None:
        """Logs a text (Markdown) once for the run."""

    def hparams(self, config: Config) -> None:
        """Logs what sets the run's arm apart, for the HParams dashboard; once for each process of the run."""

    def final(self, step: int, values: Mapping[str, float]) -> None:
        """Logs what the run came to (see :func:`final_scalars`) at its last step; to the events only."""

    def flush(self) -> None:
        """Brings everything logged so far to the disk."""

    def close(self) -> None:
        """Flushes and closes; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FileRunLog(RunLog):
    """Writes ``events.out.tfevents.*`` and ``metrics.jsonl`` (one object a step: ``step`` and the tags).

    nan and infinity are themselves in the events and null in the JSON. Used as a context manager it is closed
    after an error and after Ctrl-C too.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Opens the log in ``folder``.

        Args:
            folder: the run folder; made if absent.
            purge_step: on resume, the first step that will be logged again: what an earlier process logged from
                this step on is dropped, from the JSON by an atomic rewrite, from the events by TensorBoard, which
                is told so, when it reads them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / METRICS_FILE
        if purge_step is not None and metrics.exists():
            _drop_rows(metrics, purge_step)
        self._metrics = metrics.open("a", encoding="utf-8")
        self._row: dict[str, float | None] = {}
        self._step = -1
        self._events = _next_event_file(folder)
        self._records = RecordWriter(self._events)
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._write(Event(summary=layout_summary()))
        self._has_hparams = False
        self._events.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See :meth:`RunLog.scalars`. Calls of one step share a row of the JSON, which the next step or flush ends."""
        assert step >= self._step, f"step {step} is logged after step {self._step}"
        if step > self._step:
            self._end_row()
        self._step = step
        self._row |= {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        self._write(Event(step=step, summary=_scalar_summary(values)))
        self._events.flush()

    def text(self, tag: str, text: str) -> None:
        """See :meth:`RunLog.text`; to the events only."""
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[text.encode()])
        self._write(Event(summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])))

    def hparams(self, config: Config) -> None:
        """See :meth:`RunLog.hparams`."""
        self._has_hparams = True
        for summary in hparams_summaries(hyperparameters(config), arm_hash(config), time.time()):
            self._write(Event(summary=summary))

    def final(self, step: int, values: Mapping[str, float]) -> None:
        """See :meth:`RunLog.final`."""
        self._write(Event(step=step, summary=_scalar_summary(values)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the log; the HParams dashboard is told whether the run ended well."""
        if self._has_hparams and not self._events.closed:
            self._write(Event(summary=hparams_end_summary(error is None, time.time())))
        self.close()

    def flush(self) -> None:
        """See :meth:`RunLog.flush`."""
        self._end_row()
        for file in (self._events, self._metrics):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """See :meth:`RunLog.close`."""
        if not self._events.closed:
            self.flush()
            self._events.close()
            self._metrics.close()

    def _end_row(self) -> None:
        if self._row:
            self._metrics.write(json.dumps({"step": self._step, **self._row}, allow_nan=False) + "\n")
            self._metrics.flush()
            self._row = {}

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


def write_image(folder: Path, tag: str, png: bytes, *, step: int, width: int, height: int) -> Path:
    """Adds an image to the dashboards of a run that has ended, as an event file of its own; returns its path.

    It appears as a whole: TensorBoard may be reading the folder.
    """
    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
    content = io.BytesIO()
    records = RecordWriter(content)
    for event in (
        Event(file_version="brain.Event:2"),
        Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, image=image)])),
    ):
        event.wall_time = time.time()
        records.write(event.SerializeToString())
    partial = folder / f".{tag}.{os.getpid()}.partial"
    partial.write_bytes(content.getvalue())
    return partial.replace(folder / f"{_next_event_name(folder)}.{tag}")


def eval_scalars(result: EvalResult) -> dict[str, float]:
    """Tags of one evaluation: ``eval/<metric>`` and ``eval/tower/<name>/<metric>``."""
    values = {f"eval/{name}": getattr(result, name) for name in ("ne", "auc", "logloss", "calibration", "base_rate")}
    values |= {f"eval/{name}": value for name, value in result.extra.items()}
    for tower, metrics in result.towers.items():
        values |= {f"eval/tower/{tower}/{name}": value for name, value in metrics.items()}
    return values


def final_scalars(summary: RunSummary, peak_memory_gib: float | None = None) -> dict[str, float]:
    """Tags of what a run came to: those of :data:`erase_rec.dashboards.FINAL_METRICS` that are defined.

    Args:
        summary: of the run.
        peak_memory_gib: most device memory held; None: not known.
    """
    values = {
        "final/ne": summary.eval.ne,
        "final/auc": summary.eval.auc,
        "final/train_ne": summary.train.ne,
        "final/qps_p90": summary.throughput.qps_p90,
        "final/qps_mean": summary.throughput.qps_mean,
    }
    if peak_memory_gib is not None:
        values[PEAK_MEMORY] = peak_memory_gib
    return {tag: value for tag, value in values.items() if math.isfinite(value)}


def _scalar_summary(values: Mapping[str, float]) -> Summary:
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def _drop_rows(metrics: Path, purge_step: int) -> None:
    """Rewrites ``metrics`` without the rows from ``purge_step`` on, and without a line that a kill cut short."""
    kept = []
    for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] >= purge_step:
            break  # steps rise: nothing after this line is older
        kept.append(line)
    partial = metrics.with_name(metrics.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(metrics)


def _next_event_file(folder: Path) -> BinaryIO:
    return (folder / _next_event_name(folder)).open("xb")


def _next_event_name(folder: Path) -> str:
    """A name of an event file that sorts after those in ``folder``: TensorBoard reads them in that order.

    The name starts with the time in seconds; a process that resumes within the same second counts on.
    """
    earlier = (path.name.removeprefix(EVENT_PREFIX).split(".")[0] for path in folder.glob(f"{EVENT_PREFIX}*"))
    newest = max((int(second) for second in earlier if second.isdigit()), default=0)
    second = max(int(time.time()), newest + 1)
    return f"{EVENT_PREFIX}{second:010d}.{socket.gethostname()}.{os.getpid()}"

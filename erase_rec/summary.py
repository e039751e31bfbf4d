"""``summary.json``: what a run came to. Its schema is documented in ``docs/summary.md``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from rich.table import Table

from erase_rec.errors import UserError
from erase_rec.protocols import EvalResult
from erase_rec.throughput import Throughput

SUMMARY_FILE = "summary.json"

_PART = {"share": ("share of logit", ".1%"), "ne_without": ("NE without", ".5f")}
"""Columns of a tower's part in the model, with header and format; shown where known."""

Status = Literal["completed", "stopped_early", "interrupted", "failed"]

Value = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number; nan (and infinity) is null in the file."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class EvalSummary(_Section):
    """Held-out metrics of the model; further registered metrics are kept beside the declared ones."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Value]

    ne: Value = math.nan
    auc: Value = math.nan
    logloss: Value = math.nan
    calibration: Value = math.nan
    base_rate: Value = math.nan
    rows: int = 0


class TowerSummary(_Section):
    """Held-out metrics of a tower's local logit, and its part in the model."""

    ne: Value
    auc: Value
    share: Value = math.nan
    ne_without: Value = math.nan
    correlation: Value = math.nan
    most_like: str | None = None
    grad_norm: Value = math.nan


class ThroughputSummary(_Section):
    """Rows a second over all ranks, after warm-up."""

    qps_p10: Value = math.nan
    qps_p50: Value = math.nan
    qps_p90: Value = math.nan
    qps_mean: Value = math.nan
    data_wait_share: Value = math.nan
    steps: int = 0
    global_batch_size: int
    ranks: int = 1

    @classmethod
    def of(cls, throughput: Throughput, global_batch_size: int, ranks: int) -> Self:
        """From the step timer's total."""
        return cls(
            qps_p10=throughput.qps_p10,
            qps_p50=throughput.qps_p50,
            qps_p90=throughput.qps_p90,
            qps_mean=throughput.qps_mean,
            data_wait_share=throughput.data_wait_share,
            steps=throughput.steps,
            global_batch_size=global_batch_size,
            ranks=ranks,
        )


class TrainSummary(_Section):
    """Training of the whole run, over resumes."""

    steps: int
    rows: int
    ne: Value


class DataSummary(_Section):
    """The data that the run read."""

    fingerprint: str
    unseen_share: Value
    bad_rows: int = 0


class Summary(_Section):
    """A whole ``summary.json``."""

    status: Status
    eval: EvalSummary = EvalSummary()
    towers: dict[str, TowerSummary] = {}
    throughput: ThroughputSummary
    train: TrainSummary
    data: DataSummary

    def write(self, folder: Path) -> Path:
        """Writes ``summary.json`` in ``folder`` atomically: a reader sees the old one or the new one."""
        path = folder / SUMMARY_FILE
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        return path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads ``summary.json`` in ``folder``.

        Raises:
            UserError: there is none, or it does not have the documented form.
        """
        path = folder / SUMMARY_FILE
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path} does not exist: the run has not ended, or {folder} is not a run folder") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); copy the run folder again") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{path}: {place or 'the file'}: {first['msg']}; see docs/summary.md") from error

    def table(self) -> Table:
        """NE and AUC of the model and each tower, with the speed below."""
        table = metrics_table(self.eval, self.towers)
        speed = self.throughput
        table.caption = (
            f"QPS mean {_number(speed.qps_mean, ',.0f')}, p10 {_number(speed.qps_p10, ',.0f')}, "
            f"p50 {_number(speed.qps_p50, ',.0f')}, p90 {_number(speed.qps_p90, ',.0f')} "
            f"over {speed.steps:,} steps of {speed.global_batch_size:,} rows"
            f"{f' on {speed.ranks} ranks' if speed.ranks > 1 else ''}, "
            f"{_number(speed.data_wait_share, '.1%')} of the time waiting for data"
        )
        return table


class Evaluation(_Section):
    """The part of a :class:`Summary` that an evaluation fills."""

    eval: EvalSummary
    towers: dict[str, TowerSummary] = {}

    def table(self) -> Table:
        """NE and AUC of the model and each tower."""
        return metrics_table(self.eval, self.towers)


def summarize_eval(
    result: EvalResult, grad_norms: Mapping[str, float] | None = None
) -> tuple[EvalSummary, dict[str, TowerSummary]]:
    """The sections ``eval`` and ``towers`` of one evaluation; ``grad_norms`` of the towers' last logged step."""
    extra: dict[str, Any] = dict(result.extra)
    model = EvalSummary(
        ne=result.ne,
        auc=result.auc,
        logloss=result.logloss,
        calibration=result.calibration,
        base_rate=result.base_rate,
        rows=result.rows,
        **extra,
    )
    towers = {
        name: TowerSummary(
            **dict(values), most_like=result.most_like.get(name), grad_norm=(grad_norms or {}).get(name, math.nan)
        )
        for name, values in result.towers.items()
    }
    return model, towers


def metrics_table(model: EvalSummary, towers: dict[str, TowerSummary]) -> Table:
    """NE and AUC of the model and each tower; undefined values are a dash."""
    constant = (model.model_extra or {}).get("ne_base_rate", model.base_rate)
    compared = "" if constant == model.base_rate else f", NE against {_number(constant, '.5f')}"
    title = f"held-out metrics, {model.rows:,} rows, base rate {_number(model.base_rate, '.5f')}{compared}"
    table = Table(title=title)
    table.add_column("")
    part = [column for column in _PART if any(not math.isnan(getattr(tower, column)) for tower in towers.values())]
    for column in ("NE", "AUC", "logloss", "calibration", *(_PART[column][0] for column in part)):
        table.add_column(column, justify="right")
    for name, tower in towers.items():
        of_tower = (_number(getattr(tower, column), _PART[column][1]) for column in part)
        table.add_row(name, _number(tower.ne, ".5f"), _number(tower.auc, ".5f"), "", "", *of_tower)
    table.add_section()
    cells = (model.ne, model.auc, model.logloss, model.calibration)
    table.add_row("model", *(_number(cell, ".5f") for cell in cells), style="bold")
    return table


def _number(value: float, spec: str) -> str:
    return "-" if math.isnan(value) else format(value, spec)

"""What TensorBoard's Custom Scalars and HParams dashboards read of a run, as summaries of its own event file.

``SummaryWriter.add_hparams`` would write a second run beside each run; these are the records that it writes there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams

from erase_rec.config.schema import Config

CHARTS: Mapping[str, Mapping[str, str]] = {
    "NE": {
        "held out": "eval/ne",
        "progressive, a window of training rows": "train/ne",
        "towers' local logits, held out": "eval/tower/.*/ne",
        "towers' local logits, a window of training rows": "tower/.*/ne",
    },
    "QPS (rows a second)": {
        "p90 over the steps of a window": "throughput/qps_p90",
        "p50 over the steps of a window": "throughput/qps_p50",
        "mean of a window": "throughput/qps_mean",
    },
}
"""Titles of the charts by category, and the tags that each shows: a regular expression for the whole tag."""

FINAL_METRICS: Mapping[str, str] = {
    "final/ne": "NE",
    "final/auc": "AUC",
    "final/train_ne": "progressive NE",
    "final/qps_p90": "QPS p90",
    "final/qps_mean": "QPS mean",
}
"""Tags of what a run came to, and what the HParams dashboard calls them."""

PEAK_MEMORY = "final/peak_memory_gib"
"""Most device memory that PyTorch held for the first rank, GiB."""

Hyperparameter = bool | float | str


def hyperparameters(config: Config) -> dict[str, Hyperparameter]:
    """What sets arms apart, flat, the same keys for every run; the seed is none of it."""
    schedule, distributed, optimizer = config.schedule, config.distributed, config.optimizer
    values: dict[str, bool | float | str | None] = {
        "preset": schedule.preset,
        "early_backward": schedule.early_backward,
        "dispatch": schedule.dispatch,
        "cuda_graph": schedule.cuda_graph,
        "step_optimizer": schedule.optimizer,
        "reduction": distributed.reduction,
        "find_unused_parameters": distributed.find_unused_parameters,
        "towers": len(config.towers),
        "detached_towers": sum(bool(tower.detach) for tower in config.towers),
        "streams": len({tower.name if tower.stream == "own" else tower.stream for tower in config.towers}),
        "local_batch_size": config.train.local_batch_size,
        "micro_batches": config.train.micro_batches,
        "precision": config.train.precision,
        "dense_lr": optimizer.dense.lr,
        "sparse_lr": optimizer.sparse.lr,
    }
    return {key: _plain(value) for key, value in values.items()}


def arm_hash(config: Config) -> str:
    """Equal for runs that differ in the seed and the run folder alone: the HParams dashboard shows their mean."""
    fields = config.model_dump(mode="json", exclude={"schema_version", "seed", "run"})
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def layout_summary() -> Summary:
    """The layout of the Custom Scalars dashboard; TensorBoard merges those of all runs into one."""
    categories = [
        layout_pb2.Category(
            title=category,
            chart=[
                layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"^{tag}$"]))
                for title, tag in charts.items()
            ],
        )
        for category, charts in CHARTS.items()
    ]
    layout = layout_pb2.Layout(category=categories)
    return _summary(
        custom_scalar.CONFIG_SUMMARY_TAG,
        custom_scalar.create_summary_metadata(),
        TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[layout.SerializeToString()]),
    )


def hparams_summaries(values: Mapping[str, Hyperparameter], group: str, started_s: float) -> list[Summary]:
    """Names and types of the hyperparameters and metrics, and this run's values.

    Args:
        values: see :func:`hyperparameters`.
        group: runs of one group are shown as one line.
        started_s: when the run began, seconds of Unix time.
    """
    experiment = api_pb2.Experiment(
        hparam_infos=[api_pb2.HParamInfo(name=name, type=_type(value), differs=True) for name, value in values.items()],
        metric_infos=[
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=title)
            for tag, title in FINAL_METRICS.items()
        ],
    )
    start = plugin_data_pb2.SessionStartInfo(group_name=group, start_time_secs=started_s)
    for name, value in values.items():
        setattr(start.hparams[name], _field(value), value)
    return [
        _hparams_summary(hparams.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment)),
        _hparams_summary(hparams.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=start)),
    ]


def hparams_end_summary(succeeded: bool, ended_s: float) -> Summary:
    """That the run ended, and how."""
    status = api_pb2.STATUS_SUCCESS if succeeded else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ended_s)
    return _hparams_summary(hparams.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))


def _hparams_summary(tag: str, content: plugin_data_pb2.HParamsPluginData) -> Summary:
    return _summary(tag, hparams.create_summary_metadata(content), hparams.NULL_TENSOR)


def _summary(tag: str, metadata: SummaryMetadata, tensor: TensorProto) -> Summary:
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def _plain(value: bool | float | str | None) -> Hyperparameter:
    if value is None:
        return "none"
    return value if isinstance(value, bool | str) else float(value)


def _type(value: Hyperparameter) -> int:
    if isinstance(value, str):
        return int(api_pb2.DATA_TYPE_STRING)
    return int(api_pb2.DATA_TYPE_BOOL if isinstance(value, bool) else api_pb2.DATA_TYPE_FLOAT64)


def _field(value: Hyperparameter) -> str:
    """The field of a protobuf ``Value`` that holds it."""
    if isinstance(value, str):
        return "string_value"
    return "bool_value" if isinstance(value, bool) else "number_value"

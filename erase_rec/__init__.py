"""erase-rec: early-backward training of click-through-rate models.

What programs and notebooks use is here: ``from erase_rec import Config, Trainer``. Each name is loaded when it is first
used, so that ``import erase_rec`` costs nothing. The rest of the package is the engine, which knows no content
(``models``, ``data``, ``eval``); ``erase_rec.api`` and the command line join them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from erase_rec.api.config import Config
    from erase_rec.api.history import read_history
    from erase_rec.api.predictor import Predictor
    from erase_rec.api.trainer import Trainer
    from erase_rec.callbacks import Callback, CallbackError, RunState
    from erase_rec.config.schema import (
        DataConfig,
        DenseFeatureConfig,
        DenseOptimizerConfig,
        DistributedConfig,
        EarlyStoppingConfig,
        EmbeddingConfig,
        EvalConfig,
        FeaturesConfig,
        LabelConfig,
        LossConfig,
        LRScheduleConfig,
        ModelConfig,
        OptimizerConfig,
        OverArchConfig,
        RunConfig,
        ScheduleConfig,
        SparseFeatureConfig,
        SparseOptimizerConfig,
        SplitConfig,
        TowerConfig,
        TowerInputsConfig,
        TrainConfig,
    )
    from erase_rec.errors import ConfigError, UserError
    from erase_rec.protocols import EvalResult
    from erase_rec.summary import Evaluation, Summary

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "CallbackError",
    "Config",
    "ConfigError",
    "DataConfig",
    "DenseFeatureConfig",
    "DenseOptimizerConfig",
    "DistributedConfig",
    "EarlyStoppingConfig",
    "EmbeddingConfig",
    "EvalConfig",
    "EvalResult",
    "Evaluation",
    "FeaturesConfig",
    "LRScheduleConfig",
    "LabelConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverArchConfig",
    "Predictor",
    "RunConfig",
    "RunState",
    "ScheduleConfig",
    "SparseFeatureConfig",
    "SparseOptimizerConfig",
    "SplitConfig",
    "Summary",
    "TowerConfig",
    "TowerInputsConfig",
    "TrainConfig",
    "Trainer",
    "UserError",
    "__version__",
    "read_history",
]

_MODULES = {
    "Callback": "erase_rec.callbacks",
    "CallbackError": "erase_rec.callbacks",
    "Config": "erase_rec.api.config",
    "ConfigError": "erase_rec.errors",
    "EvalResult": "erase_rec.protocols",
    "Evaluation": "erase_rec.summary",
    "Predictor": "erase_rec.api.predictor",
    "RunState": "erase_rec.callbacks",
    "Summary": "erase_rec.summary",
    "Trainer": "erase_rec.api.trainer",
    "UserError": "erase_rec.errors",
    "read_history": "erase_rec.api.history",
}
"""Where the names are that are no sections of the configuration."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES.get(name, "erase_rec.config.schema")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

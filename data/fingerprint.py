"""The identity of a run's rows: what was read, and every setting that decides what becomes of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from data.registry import SOURCES, SourceCatalog
from erase_rec.config.schema import Config, DataConfig


def holds_out(data: DataConfig) -> bool:
    """Whether rows of the training files are held out."""
    return not data.eval and (data.eval_fraction is not None or data.split.by in ("column", "time"))


def settings(config: Config) -> dict[str, Any]:
    """The settings that decide which rows there are and how they are encoded; JSON. Paths do not count.

    Args:
        config: checked, defaults filled in.
    """
    data = config.data
    samples = data.negative_sampling_rate is not None and not data.negatives_sampled
    drawn = samples or (holds_out(data) and data.split.by in ("row", "hash"))
    params: Any = data.params
    if data.kind in SOURCES:
        model = SourceCatalog().params_model("source", data.kind)
        params = model.model_validate(data.params).model_dump(mode="json")
    return {
        "data": {
            "kind": data.kind,
            "params": params,
            "label": data.label.model_dump(mode="json"),
            "split": data.split.model_dump(mode="json") if holds_out(data) else None,
            "eval_fraction": data.eval_fraction,
            "bad_rows": "error" if data.bad_rows == "error" else "left out",
            **({"negative_sampling_rate": data.negative_sampling_rate} if samples else {}),
        },
        "seed": config.seed if drawn else None,
        "features": config.features.model_dump(mode="json"),
    }


def fingerprint(config: Config, train_digest: str, eval_digest: str | None) -> str:
    """Hex SHA-256; two runs with the same one train and evaluate on the same encoded rows.

    Args:
        config: checked, defaults filled in.
        train_digest: fingerprint of the training source's content.
        eval_digest: of the evaluation source's; None: there is none, or rows of the training source are held out.
    """
    decisive = {"train": train_digest, "eval": eval_digest, **settings(config)}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def differences(wanted: Any, prepared: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys at which two trees of settings differ, with both values."""
    if isinstance(wanted, dict) and isinstance(prepared, dict):
        for key in [*wanted, *(key for key in prepared if key not in wanted)]:
            yield from differences(wanted.get(key), prepared.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(wanted, list) and isinstance(prepared, list) and len(wanted) == len(prepared):
        for position, pair in enumerate(zip(wanted, prepared, strict=True)):
            yield from differences(*pair, f"{path}.{position}")
    elif wanted != prepared:
        yield path, wanted, prepared

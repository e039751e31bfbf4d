"""benchmarks/faults.py as a module: what happens to runs there is what tests let happen."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _loaded() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.py"
    spec = importlib.util.spec_from_file_location("faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


faults = _loaded()
